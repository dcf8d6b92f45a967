"""A recommender that takes long for a prediction, and the same one after what `transect explain` says was done.

    transect explain run -- python examples/explain/recommender.py slow
    python examples/explain/recommender.py compare

Both run on a GPU with ``--device cuda``. The model is real: embedding tables of users, items and tags, and an MLP over
them. What is slow is how it is used: one item at a time, with its tags looked up one by one, tables converted for each
item, scores read back one by one, and gradients recorded that nobody asks for. The fast version scores all candidates
in one batch. ``compare`` prints what the findings promised beside what the fast version gave.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor, nn

USERS, ITEMS, TAGS, DIM = 5_000, 20_000, 2_000, 64
CANDIDATES, TAGS_EACH, BEST = 100, 8, 10


class Recommender(nn.Module):
    """Scores items for a user: ``[C]`` scores of ``[C]`` items, each with ``[C, T]`` tags."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items, self.tags = (nn.Embedding(count, DIM) for count in (USERS, ITEMS, TAGS))
        self.mlp = nn.Sequential(nn.Linear(3 * DIM, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, user: Tensor, items: Tensor, tags: Tensor) -> Tensor:
        """All candidates together."""
        who = self.users(user).expand(len(items), DIM)
        return self.mlp(torch.cat([who, self.items(items), self.tags(tags).mean(1)], 1)).squeeze(1)


def slow(model: Recommender, user: Tensor, items: Tensor, tags: Tensor) -> list[int]:
    """The best items, one candidate at a time."""
    scores = []
    for place in range(len(items)):
        seen = torch.zeros(DIM, dtype=torch.float64, device=items.device)
        for tag in tags[place]:
            seen = seen + model.tags(tag).double()
        features = torch.cat([model.users(user)[0].double(), model.items(items[place]).double(), seen / TAGS_EACH])
        scores.append(model.mlp(features.float()).item())
    return sorted(range(len(scores)), key=lambda place: -scores[place])[:BEST]


@torch.inference_mode()
def fast(model: Recommender, user: Tensor, items: Tensor, tags: Tensor) -> list[int]:
    """The same, in one batch, without gradients, with one read at the end."""
    return model(user, items, tags).topk(BEST).indices.tolist()


def setting(device: str = "cpu") -> tuple[Recommender, Tensor, Tensor, Tensor]:
    """A model and one request."""
    torch.manual_seed(0)
    user = torch.randint(USERS, (1,))
    items, tags = torch.randperm(ITEMS)[:CANDIDATES], torch.randint(TAGS, (CANDIDATES, TAGS_EACH))
    return Recommender().to(device), user.to(device), items.to(device), tags.to(device)


def seconds(function, *arguments) -> tuple[float, list[int]]:
    """The fastest of three calls, and its result."""
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        result = function(*arguments)
        best = min(best, time.perf_counter() - began)
    return best, result


def compare(device: str = "cpu") -> dict[str, float]:
    """Seconds before and after, what the findings promise together, and the share of the time at the floor."""
    from transect.explain import Explain

    request = setting(device)
    before, chosen = seconds(slow, *request)
    after, same = seconds(fast, *request)
    assert chosen == same, "the two versions disagree"
    with Explain() as run:
        slow(*request)
    found = run.result
    promised = sum(each.share for each in found.findings)
    return {
        "slow_s": before,
        "fast_s": after,
        "times": before / after,
        "predicted_share": min(1.0, promised),
        "obtained_share": 1 - after / before,
        "at_the_floor": found.split.share("floor"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["slow", "compare"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write the figures of compare here")
    options = parser.parse_args()
    if options.what == "slow":
        print("best items:", slow(*setting(options.device)))
        return
    found = compare(options.device)
    print(f"slow {1e3 * found['slow_s']:.1f} ms, fast {1e3 * found['fast_s']:.2f} ms: {found['times']:.0f}x")
    print(
        f"of the slow time {found['at_the_floor']:.1%} is at the floor; the findings promise "
        f"{found['predicted_share']:.0%} of it, the fast version saves {found['obtained_share']:.0%}"
    )
    if options.json:
        from transect.hardware.environment import environment

        gpu = {"gpu": torch.cuda.get_device_name()} if options.device == "cuda" else {}
        command = f"python examples/explain/recommender.py compare --device {options.device}"
        result = {"command": command, "environment": environment() | gpu, **found}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
