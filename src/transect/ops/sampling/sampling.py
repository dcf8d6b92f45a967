r"""Draw the next token of every row on the device: greedy, temperature, top-k, top-p, min-p, in one set of launches.

For a row of logits x, temperature t, and noise G (``lang/philox.py``), a function of (seed, choice, position, id):

    z_i = (x_i - max x) / t           kept: z_i >= log(min_p), z_i >= the k-th largest z, and of those the likeliest,
    token = argmax over kept (z_i + G_i)      equals in the order of their ids, until their mass reaches top_p

This is a draw from the kept tokens' softmax (Gumbel-max; Gumbel 1954, Maddison et al. 2014). All tokens equal to the
k-th are kept. Temperature 0 is argmax, the lower id of equals. A row that keeps its whole vocabulary first draws a
group of 128 tokens by its mass, then a token within it: the same distribution with V / 128 + 128 random numbers in
place of V. These are the rules of ``engine/executors/sampler.py``, and the draws are the same tokens, up to rounding
of a score (about 1e-6).

Nothing is sorted:

* ``_groups`` reads the logits once, at the rate of memory, and leaves the largest logit and the mass of each group.
  Then one program a row knows the row's maximum, its mass, and a bar for what can matter: the k-th largest group
  maximum (at least k tokens reach it), min-p's floor, or 2**-13 of the mass.
* ``_collect`` gathers what passes the bar, usually some hundred tokens.
* ``_choose`` settles the row on those. It finds the k-th largest by a search over bit patterns, then takes the best
  score and checks it against top-p. If the token lies outside, it excludes everything after it, and the best of the
  tokens before it is next, so few rounds are needed. A flat row (more than CANDIDATES above the bar, or too little
  mass) is settled the same way on all its tokens.

Masses are added as integers (units of 2**-42), so the order of arrival cannot change them: a row's token does not
depend on the other rows, to the bit.

On Hopper the launches are dependent: each begins while the one before it runs, and reads a row's parameters,
temperature to position, before that has ended. So the kernel before the first of them must not write those.

Where a vocabulary is cut between ranks, each passes over its own logits; a sum joins the groups' maxima and masses
(``LogitShards``). Everything after it runs on every rank as on one GPU. It reads other ranks' logits (a group, or the
tokens above the bar) in their memory. So tokens are those of one GPU, whatever is asked for.

Shapes: logits ``[R, V]``; temperature, top_p, min_p float32 ``[R]``; top_k int32 ``[R]`` (0 or at least V: off); seed
int64 ``[R]``; choice and position int32 or int64 ``[R]``; result int64 ``[R]``. No gradient. The host reads no value.

Bound by bytes: the logits once, 2 V or 4 V a row. The kernels are in ``triton.py``.
Source: rejection in place of sorting: FlashInfer (Ye et al. 2025, arXiv:2501.01005), whose draws are not Gumbel-max.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...costs.work import Cost
from .. import shapes
from ..lang.jit import (
    INTERPRETED,
    has_dependent_launch,
    in_triton,
    next_power_of_2,
    require,
    rows_of,
)
from ..lang.philox import GROUP, GROUP_STREAM, SMALLEST_TEMPERATURE, TOKEN_STREAM, gumbel
from ..numerics import compute_dtype
from ..numerics import sample as normal
from ..registry import Case, Knobs, Op, in_torch, register
from ..tuning import Config
from ..tuning import choose as tuned
from .triton import CANDIDATES, _choose, _collect, _groups, _settle, kernels

COLLECTORS = 512
"""Programs of ``_collect`` for all rows together, where a row has enough groups: as many as an H200 runs at once with
128 registers a thread. Twice as many for more than MANY_ROWS rows, each of which would otherwise get too few."""
MANY_ROWS = 64


@dataclass(frozen=True, slots=True)
class LogitShards:
    """A row of logits that lies in parts of one width on several ranks, in memory which all of them can read. Between
    two draws the ranks must meet (in the sums of a step's layers), so that none overwrites what another still reads.

    Attributes:
        kept: ``[rows, share]``, where the own part is left for the others, in the dtype of the logits; share is a
            multiple of 128.
        away: int64 ``[ranks]``: how many numbers from ``kept`` the part of each rank begins, less the id of its first
            token.
        rank: the own place among them.
        vocab: number of tokens.
        sum: adds up a float32 tensor over the ranks, in its place. No rank leaves it before all have come to it.
    """

    kept: Tensor
    away: Tensor
    rank: int
    vocab: int
    sum: Callable[[Tensor], Tensor]

    def refusal(self, logits: Tensor) -> str | None:
        """Return the reason why ``logits`` ``[R, V here]`` cannot be this rank's part; None if they can."""
        most, share = self.kept.shape
        if share % GROUP or logits.dtype != self.kept.dtype:
            return f"parts are multiples of {GROUP} tokens in {self.kept.dtype}, not {share} in {logits.dtype}"
        here = min(share, self.vocab - self.rank * share)
        if logits.shape[0] > most or logits.shape[1] != here:
            return f"the part is [at most {most}, {here}], not {list(logits.shape)}"
        return None


def reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    choice: Tensor,
    position: Tensor,
) -> Tensor:
    """Sample one token for each row, int64 ``[R]``, by a full sort. A row that holds NaN or +inf, or only -inf, yields
    0."""
    tokens = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    for row, x in enumerate(logits.to(compute_dtype(logits.dtype))):
        peak = x.max() if len(x) else x.new_tensor(torch.nan)
        if not torch.isfinite(peak):
            continue
        if float(temperature[row]) == 0.0:
            tokens[row] = (x == peak).nonzero()[0, 0]
            continue
        z = (x - peak) / temperature[row].clamp(min=SMALLEST_TEMPERATURE)
        key = [int(seed[row])], [int(choice[row])], [int(position[row])]
        tokens[row] = _draw(z, int(top_k[row]), float(top_p[row]), float(min_p[row]), key)
    return tokens


def _draw(z: Tensor, top_k: int, top_p: float, min_p: float, key: tuple[list[int], list[int], list[int]]) -> Tensor:
    vocab = len(z)
    limited = 0 < top_k < vocab
    ids = torch.arange(vocab, device=z.device)
    if not limited and top_p >= 1.0 and min_p <= 0.0:
        padded = torch.nn.functional.pad(z, (0, -vocab % GROUP), value=-torch.inf).view(-1, GROUP)
        groups = torch.arange(len(padded), device=z.device)
        score = padded.double().exp().sum(-1).log() + gumbel(*key, groups[None], GROUP_STREAM)[0]
        ids = ids[int(score.argmax()) * GROUP :][:GROUP]
        return ids[(z[ids].double() + gumbel(*key, ids[None], TOKEN_STREAM)[0]).argmax()]
    z, order = z.sort(descending=True, stable=True)
    keep = (z > -torch.inf) & (z >= torch.tensor(min_p, dtype=torch.float64).log().to(z.dtype).to(z.device))
    if limited:
        keep &= z >= z[top_k - 1]
    mass = z.double().exp() * keep
    if top_p < 1.0:
        keep &= mass.cumsum(0) - mass < top_p * mass.sum()
        keep[0] = True
    score = z.double() + gumbel(*key, order[None], TOKEN_STREAM)[0]
    return order[score.masked_fill(~keep, -torch.inf).argmax()]


# -------------------------------------------------------------------------------------------------------- launchers


CHOICES = {
    "groups": (16, 32, 64),
    "warps": (2, 4, 8),
    "collected": (8, 16, 32),
    "block": (1024, 2048, 4096),
    "choose_warps": (4, 8, 16),
}
"""Groups at a time of the pass over all logits, its warps, and groups at a time of ``_collect``; tokens at a time of
``_choose``, and its warps. They change no draw."""


def rule(size: tuple[int, int]) -> Config:
    """Return the knobs for any (rows, vocabulary)."""
    return {"groups": 32, "warps": 4, "collected": 16, "block": 512 if INTERPRETED else 2048, "choose_warps": 8}


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    choice: Tensor,
    position: Tensor,
    *,
    config: Config | None = None,
    out: Tensor | None = None,
    logprobs: Tensor | None = None,
    finite: Tensor | None = None,
    spread: LogitShards | None = None,
) -> Tensor:
    """Compute ``reference`` on the device; a CUDA graph can capture it.

    Args:
        out: int64 ``[R]``, where the tokens are to go.
        logprobs: float32 ``[R]``, receives the drawn token's log-softmax, of the logits as given (temperature 1);
            NaN for a row that is not finite.
        finite: bool ``[R]``, receives whether the row has a largest logit and it is finite (no NaN, no +inf).
        spread: ``logits`` are this rank's part of them. Every rank calls this, with the same parameters, and gets the
            same results.

    Raises:
        ValueError: a tensor of the wrong shape, dtype or device.
    """
    require("sample", logits)
    if logits.dim() != 2 or not 0 < logits.shape[1] < 2**20:
        raise ValueError(f"sample: logits must be [rows, 1 to {2**20 - 1} tokens], not {list(logits.shape)}")
    if spread is not None and (reason := spread.refusal(logits)):
        raise ValueError(f"sample: {reason}")
    rows, here = logits.shape
    vocab = here if spread is None else spread.vocab
    device = logits.device
    wide = (torch.int32, torch.int64)
    f32 = (torch.float32,)
    for name, tensor, dtypes in (
        ("temperature", temperature, f32), ("top_k", top_k, wide), ("top_p", top_p, f32), ("min_p", min_p, f32),
        ("seed", seed, (torch.int64,)), ("choice", choice, wide), ("position", position, wide),
        ("out", out, (torch.int64,)), ("logprobs", logprobs, f32), ("finite", finite, (torch.bool,)),
    ):  # fmt: skip
        if tensor is None:
            continue
        if tensor.shape != (rows,) or tensor.dtype not in dtypes or tensor.device != device:
            raise ValueError(
                f"sample: {name} must be {' or '.join(map(str, dtypes))} [{rows}] on {device}, not {tensor.dtype} "
                f"{list(tensor.shape)} on {tensor.device}"
            )
        if name in ("out", "logprobs", "finite") and not tensor.is_contiguous():
            raise ValueError(f"sample: {name} must be contiguous")
    out = torch.empty(rows, dtype=torch.int64, device=device) if out is None else out
    if rows == 0:
        return out
    logits = rows_of(logits)
    temperature = temperature.contiguous()
    parameters = [temperature, *(t.contiguous() for t in (top_k, top_p, min_p, seed, choice, position))]
    flags = (torch.empty(rows, dtype=torch.bool, device=device) if finite is None else finite).view(torch.uint8)
    groups = -(-vocab // GROUP)
    width, raw = max(4, next_power_of_2(groups)), logprobs is not None
    room = -(-rows // 4) * 4  # each part begins at a multiple of 16 bytes: else other kernels are compiled for few rows
    stats = torch.empty((3, room, groups), dtype=torch.float32, device=device)
    peaks, masses, raw_masses = stats
    totals, lses = torch.empty((2, room), dtype=torch.float64, device=device)
    tops, bars = torch.empty((2, room), dtype=torch.float32, device=device)
    mode, counts = torch.empty((2, room), dtype=torch.int32, device=device)
    found_z = torch.empty((rows, CANDIDATES), dtype=torch.float32, device=device)
    found_id = torch.empty((rows, CANDIDATES), dtype=torch.int32, device=device)
    launch: dict[str, Any] = {"DEPENDENT_LAUNCH": False}
    few_registers: dict[str, int] = {}
    if has_dependent_launch(device):
        launch = {"DEPENDENT_LAUNCH": True, "launch_pdl": True}
        few_registers = {"maxnreg": 128}  # see COLLECTORS: most programs only see that a row is done
    parts: dict[str, Any] = {"SPREAD": spread is not None, **launch}
    kept, away, share, first = logits, None, 0, 0
    if spread is not None:
        kept, away, share = spread.kept, spread.away, spread.kept.shape[1]
        first = spread.rank * share // GROUP
    knobs = config or tuned("sampling", (rows, vocab), device, rule)
    pairs = logits.dtype == torch.bfloat16 and not (here | logits.stride(0) | logits.data_ptr() // 2) % 2
    _groups[(-(-groups // knobs["groups"]), rows)](
        logits, temperature, peaks, masses, raw_masses, kept, here, groups, logits.stride(0), kept.stride(0), first,
        GROUPS=knobs["groups"], PAIRS=pairs, RAW=raw, num_warps=knobs["warps"], **parts,
    )  # fmt: skip
    if spread is not None:
        spread.sum(stats[: 2 + raw])
    numbers = (away, vocab, groups, kept.stride(0), share)
    _settle[(rows,)](
        kept, *parameters, peaks, masses, raw_masses, out, logprobs, flags, mode, tops, bars, totals, lses, counts,
        *numbers, WIDTH=width, RAW=raw, num_warps=max(1, min(8, width // 256)), **parts,
    )  # fmt: skip
    # Rows that are done keep their programs for nothing, so of many rows each gets few.
    collectors = COLLECTORS * (2 if rows > MANY_ROWS else 1)
    programs = min(-(-groups // knobs["collected"]), collectors // rows)
    _collect[(max(1, programs), rows)](
        kept, temperature, peaks, mode, tops, bars, counts, found_z, found_id, *numbers, CAPACITY=CANDIDATES,
        GROUPS=knobs["collected"], num_warps=4, **parts, **few_registers,
    )  # fmt: skip
    _choose[(rows,)](
        kept, *parameters, mode, tops, bars, totals, lses, counts, found_z, found_id, out, logprobs, *numbers,
        CAPACITY=CANDIDATES, BLOCK=knobs["block"], RAW=raw, num_warps=knobs["choose_warps"], **parts,
    )  # fmt: skip
    return out


# ----------------------------------------------------------------------------------------------------- registry entry


def cost(logits: Tensor, **parameters: Tensor) -> Cost:
    """Count the logits once: a subtraction, a division, an exponential and an addition for each."""
    small = sum(t.nbytes for t in parameters.values())
    return Cost(4 * logits.numel(), logits.nbytes + small, 8 * logits.shape[0])


def _sorting(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, **others: Tensor
) -> Tensor:
    """Return the usual way in torch: softmax, sort, cumulative sum, mask, and probabilities over exponential noise. The
    noise is torch's own, whatever the rows' seeds."""
    greedy = logits.argmax(-1)
    p = torch.softmax(logits.float() / temperature.clamp(min=SMALLEST_TEMPERATURE)[:, None], -1)
    p, order = p.sort(-1, descending=True)
    vocab = logits.shape[1]
    kth = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab).long() - 1
    keep = (p >= p.gather(1, kth[:, None])) & (p >= min_p[:, None] * p[:, :1])
    p = p * keep
    p = p * (p.cumsum(-1) - p < top_p[:, None] * p.sum(-1, keepdim=True))
    drawn = order.gather(1, (p / torch.empty_like(p).exponential_()).argmax(-1, keepdim=True))[:, 0]
    return torch.where(temperature == 0, greedy, drawn)


PARAMETERS = ("temperature", "top_k", "top_p", "min_p")
SETTINGS = (
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.6, 20, 0.95, 0.0),
    (0.8, 0, 0.9, 0.0),
    (1.3, 40, 1.0, 0.0),
    (1.0, 0, 1.0, 0.05),
    (0.7, 7, 0.5, 0.01),
    (2.0, 0, 0.999, 0.0),
)
"""(temperature, top_k, top_p, min_p) of a mixed batch; rows take them in turn."""


def inputs(logits: Tensor, settings: Sequence[tuple[float, int, float, float]], seed: int = 0) -> dict[str, Any]:
    """Build the arguments for the rows of ``logits``, which cycle through ``settings``."""
    rows = [settings[row % len(settings)] for row in range(logits.shape[0])]
    columns = list(zip(*rows, strict=True)) if rows else [()] * 4
    number = torch.arange(len(rows), device=logits.device)
    made: dict[str, Any] = {"logits": logits}
    for name, column in zip(PARAMETERS, columns, strict=True):
        dtype = torch.int32 if name == "top_k" else torch.float32
        made[name] = torch.tensor(column, dtype=dtype, device=logits.device)
    made["seed"] = (number + seed) * 0x5851F42D4C957F2D
    return made | {"choice": number % 3, "position": 11 + 5 * number}


def _examples() -> Sequence[dict[str, Any]]:
    tied = normal(8, 300, seed=2).round()
    masked = 4 * normal(8, 1000, seed=3)
    masked[:, ::3] = -torch.inf
    masked[4:, 17:] = -torch.inf
    extreme = normal(8, 513, seed=4) * 1e4
    extreme[0, 400], extreme[1, 3], extreme[2] = torch.nan, torch.inf, -torch.inf
    made = [
        4 * normal(8, 777),
        0.01 * normal(8, 130, seed=1),
        tied,
        masked,
        extreme,
        torch.zeros(3, 1),
        torch.ones(0, 9),
    ]
    return [inputs(logits, SETTINGS, index) for index, logits in enumerate(made)]


def _cases() -> Sequence[Case]:
    def case(model: shapes.ModelShape, rows: int, label: str, settings: Any) -> Case:
        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            generator = torch.Generator(device).manual_seed(seed)
            logits = 2.5 * torch.randn(rows, model.vocab_size, device=device, generator=generator)
            logits[:, : 40 * 997 : 997] += 12  # some likely tokens, as a model's logits have
            return inputs(logits, settings, seed)

        return Case(f"{model.name}, {rows} rows, {label}", make, "float32")

    kinds = (
        ("mixed", SETTINGS[:7]),
        ("greedy", SETTINGS[:1]),
        ("whole", SETTINGS[1:2]),
        ("top-k and top-p", SETTINGS[2:3]),
    )
    made = [case(shapes.LLAMA_8B, rows, label, s) for rows in shapes.DECODE_ROWS for label, s in kinds]
    return [*made, *(case(shapes.QWEN3_0_6B, rows, "mixed", SETTINGS[:7]) for rows in shapes.DECODE_ROWS)]


register(
    Op(
        name="sampling",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(reference, batch_invariant=True),
            "triton": in_triton(sample, batch_invariant=True),
        },
        examples=_examples,
        peers={"torch, sorted": _sorting},
        keeps_dtype=(*PARAMETERS,),
        cases=_cases,
        kernels=kernels,
        knobs=lambda: [Knobs("sampling", CHOICES, rule, sample, dict, lambda inputs: tuple(inputs["logits"].shape))],
    )
)
