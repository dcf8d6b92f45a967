"""A recommender that takes long for a prediction, and the same one after what `transect explain` says was done.

    transect explain run -- python examples/explain/recommender.py slow
    python examples/explain/recommender.py compare

The model is real: embedding tables of users, items and tags, and an MLP over them. What is slow is how it is used: one
item at a time, with its tags looked up one by one, tables converted for each item, scores read back one by one, and
gradients recorded that nobody asks for. The fast version scores all candidates in one batch.
"""

from __future__ import annotations

import sys
import time

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
        seen = torch.zeros(DIM, dtype=torch.float64)
        for tag in tags[place]:
            seen = seen + model.tags(tag).double()
        features = torch.cat([model.users(user)[0].double(), model.items(items[place]).double(), seen / TAGS_EACH])
        scores.append(model.mlp(features.float()).item())
    return sorted(range(len(scores)), key=lambda place: -scores[place])[:BEST]


@torch.inference_mode()
def fast(model: Recommender, user: Tensor, items: Tensor, tags: Tensor) -> list[int]:
    """The same, in one batch, without gradients, with one read at the end."""
    return model(user, items, tags).topk(BEST).indices.tolist()


def setting() -> tuple[Recommender, Tensor, Tensor, Tensor]:
    """A model and one request."""
    torch.manual_seed(0)
    user = torch.randint(USERS, (1,))
    items, tags = torch.randperm(ITEMS)[:CANDIDATES], torch.randint(TAGS, (CANDIDATES, TAGS_EACH))
    return Recommender(), user, items, tags


def seconds(function, *arguments) -> tuple[float, list[int]]:
    """The fastest of three calls, and its result."""
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        result = function(*arguments)
        best = min(best, time.perf_counter() - began)
    return best, result


def main() -> None:
    request = setting()
    if sys.argv[1:] == ["slow"]:
        result = slow(*request)
        print("best items:", result)
        return
    before, chosen = seconds(slow, *request)
    after, same = seconds(fast, *request)
    assert chosen == same, "the two versions disagree"
    print(f"slow {1e3 * before:.1f} ms, fast {1e3 * after:.2f} ms: {before / after:.0f}x")


if __name__ == "__main__":
    main()
