"""Sampling on the device: the same tokens as the engine's sampler on the CPU, and the right distribution."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from effort import proving, quick_first

pytest.importorskip("triton")

from transect.ops.lang.jit import INTERPRETED
from transect.ops.lang.philox import GROUP_STREAM, TOKEN_STREAM, gumbel
from transect.ops.sampling import sampling

pytestmark = [
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs the interpreter or a GPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy says where a masked lane overflows
]
DEVICE = "cpu" if INTERPRETED else "cuda"
DRAWS = 60 if INTERPRETED else 20_000
MANY = 12 if INTERPRETED else 300
torch.set_num_threads(1)

WIDE = (
    *sampling.SETTINGS,
    (0.0, 5, 0.3, 0.2),
    (1.0, 1, 1.0, 0.0),
    (1.0, 3, 0.01, 0.0),
    (5.0, 300, 0.99, 1e-6),
    (0.3, 0, 0.5, 1.0),
    (1e-5, 0, 0.9, 0.0),
    (1.0, 10**6, 1.0, 0.0),
    (0.9, 64, 0.8, 1e-9),
)
FEW = (WIDE[0], WIDE[1], WIDE[3], WIDE[6], (1.0, 5, 1.0, 0.02), (1.0, 0, 1.0, 0.0))
SEVERAL = WIDE if proving() or not INTERPRETED else FEW


def on_cpu(made: dict) -> list[int | None]:
    """The engine's sampler, one row after another; None where it reports an error."""
    pytest.importorskip("msgspec", reason="the engine's messages need it")
    from transect.engine.executors.penalties import Pick
    from transect.engine.executors.sampler import Sampler
    from transect.engine.scheduling.batch import Draw
    from transect.engine.scheduling.sampling_params import SamplingParams

    columns = {name: value.tolist() for name, value in made.items() if name != "logits"}
    picks = []
    for row in range(len(made["logits"])):
        one = {name: column[row] for name, column in columns.items()}
        params = SamplingParams(**{name: one[name] for name in sampling.PARAMETERS})
        draw = Draw(
            seq_id=row,
            choice=one["choice"],
            seed=one["seed"],
            params=params,
            prompt_token_ids=(1,),
            output_token_ids=[],
            stop_ids=(),
            min_position=0,
        )
        picks.append(Pick(draw, one["position"], row))
    found = Sampler().sample(made["logits"].float().cpu(), picks)
    return [found.tokens.get(row) for row in range(len(picks))]


def on_device(made: dict, **outputs: torch.Tensor) -> list[int]:
    return sampling.sample(**{name: value.to(DEVICE) for name, value in made.items()}, **outputs).tolist()


def normal(rows: int, vocab: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


VOCABS, SCALES = (1, 2, 127, 128, 129, 777, 4099), (0.01, 3.0, 40.0)


@pytest.mark.parametrize(
    ("vocab", "scale"),
    quick_first(itertools.product(VOCABS, SCALES), [(1, 0.01), (2, 3.0), (128, 0.01), (129, 40.0), (4099, 3.0)]),
)
def test_draws_are_those_of_the_engine(vocab: int, scale: float) -> None:
    settings = WIDE if vocab < 1000 else SEVERAL
    made = sampling.inputs(normal(len(settings), vocab, seed=vocab, scale=scale), settings, seed=vocab)
    assert on_device(made) == on_cpu(made)


def test_ties_are_kept_or_taken_by_id() -> None:
    logits = normal(len(SEVERAL), 400, seed=5).round()
    logits[3] = 0.0
    made = sampling.inputs(logits, SEVERAL)
    assert on_device(made) == on_cpu(made)
    equal = torch.zeros(MANY, 10)
    assert set(on_device(sampling.inputs(equal, [(1.0, 0, 0.35, 0.0)]))) == {0, 1, 2, 3}
    steps = torch.tensor([5.0, 4.0, 4.0, 4.0, 1.0]).repeat(MANY, 1)
    assert set(on_device(sampling.inputs(steps, [(3.0, 2, 1.0, 0.0)]))) == {0, 1, 2, 3}


def test_masked_tokens_never_come() -> None:
    logits = normal(len(WIDE), 1000, seed=6)
    logits[:, 1::2] = -math.inf
    logits[::2, 300:] = -math.inf
    logits[3] = -math.inf
    logits[3, 998] = 0.0
    made = sampling.inputs(logits, WIDE)
    tokens = on_device(made)
    assert tokens == on_cpu(made)
    assert all(token % 2 == 0 for token in tokens) and tokens[3] == 998


def test_flat_rows_are_settled_on_all_tokens() -> None:
    """More tokens above the bar than are collected, or top-p out of the reach of those that are."""
    settings = ((1.0, 0, 0.9, 0.0), (1.0, 8300, 0.5, 0.0), (1.0, 8400, 1.0, 1e-9), (1.0, 0, 1.0, 1e-6))
    settings = settings if proving() else settings[:2]
    flat = sampling.inputs(normal(len(settings), 8500, seed=7, scale=0.5), settings)
    assert on_device(flat) == on_cpu(flat)
    peaked = normal(2, 8500, seed=8, scale=0.5)
    peaked[:, 77] = 12.0
    made = sampling.inputs(peaked, ((1.0, 0, 0.97, 0.0), (1.0, 0, 0.999, 0.0)))
    assert on_device(made) == on_cpu(made)


def nearly_tied(stream: int, vocab: int) -> tuple[dict, list[int]]:
    """Rows of equal logits at positions where the noise of this stream differs, between the first two, by less than a
    first look can see; and which of the two is to win."""
    positions = list(range(200_000))
    count = len(positions)
    noise = gumbel([7] * count, [0] * count, positions, torch.arange(2).expand(count, 2), stream)
    gap = (noise[:, 0] - noise[:, 1]).abs()
    near = gap.argsort()[: len(sampling.SETTINGS)]
    first = noise[near].argmax(-1).tolist()
    assert gap[near].max() < 2e-4 and len(set(first)) == 2
    made = sampling.inputs(torch.zeros(len(near), vocab), [(1.0, 0, 1.0, 0.0)])
    return made | {"position": near, "seed": torch.full_like(near, 7), "choice": torch.zeros_like(near)}, first


def test_groups_whose_scores_are_nearly_equal_are_told_apart() -> None:
    made, first = nearly_tied(GROUP_STREAM, 256)
    tokens = on_device(made)
    assert tokens == on_cpu(made)
    assert [token // 128 for token in tokens] == first


def test_tokens_whose_scores_are_nearly_equal_are_told_apart() -> None:
    """Two tokens of one group."""
    made, first = nearly_tied(TOKEN_STREAM, 2)
    assert on_device(made) == on_cpu(made) == first


class Apart(Exception):
    """A rank has come to the sum of all ranks."""


def on_ranks(made: dict, ranks: int, **outputs: torch.Tensor) -> list[list[int]]:
    """What each of several ranks draws, with a part of the logits each; one device plays them all."""
    made = {name: value.to(DEVICE) for name, value in made.items()}
    logits = made.pop("logits")
    rows, vocab = logits.shape
    share = -(-vocab // (128 * ranks)) * 128
    kept = torch.full((ranks, rows, share), 1e9, dtype=logits.dtype, device=DEVICE)
    found: list[torch.Tensor] = []

    def drawn(rank: int, sum_: object, **more: torch.Tensor) -> torch.Tensor:
        away = [(other - rank) * kept[0].numel() - other * share for other in range(ranks)]
        spread = sampling.LogitShards(kept[rank], torch.tensor(away, device=DEVICE), rank, vocab, sum_)
        return sampling.sample(logits[:, rank * share :][:, :share], **made, spread=spread, **more)

    def come(stats: torch.Tensor) -> None:
        found.append(stats.clone())
        raise Apart

    for rank in range(ranks):
        with pytest.raises(Apart):
            drawn(rank, come, **outputs)
    assert not torch.isinf(torch.stack(found)[:, 0, :rows]).all(0).any()  # a group is of one rank
    total = torch.stack(found).sum(0)
    return [drawn(rank, lambda stats: stats.copy_(total), **outputs).tolist() for rank in range(ranks)]


@pytest.mark.parametrize(
    ("vocab", "ranks", "dtype", "settings"),
    [
        (301, 2, torch.bfloat16, FEW),
        pytest.param(777, 2, torch.float32, WIDE, marks=pytest.mark.prove),
        pytest.param(1500, 4, torch.bfloat16, WIDE, marks=pytest.mark.prove),
    ],
)
def test_ranks_draw_what_one_draws_of_the_whole(vocab: int, ranks: int, dtype: torch.dtype, settings: tuple) -> None:
    """Greedy, whole rows, and every way to narrow them; equals, excluded tokens and rows that are not finite too."""
    rows = len(settings)
    logits = normal(rows, vocab, seed=vocab).to(dtype)
    logits[1::4] = logits[1::4].round()
    logits[2::5, ::3] = -math.inf
    logits[3, 200], logits[4, 3] = math.nan, math.inf
    made = sampling.inputs(logits, settings, seed=vocab)
    found = [
        {"logprobs": torch.empty(rows, device=DEVICE), "finite": torch.empty(rows, dtype=torch.bool, device=DEVICE)}
        for _ in range(2)
    ]
    assert on_ranks(made, ranks, **found[0]) == [on_device(made, **found[1])] * ranks
    assert [row for row, good in enumerate(found[0]["finite"].tolist()) if not good] == [3, 4]
    assert all(torch.equal(found[0][name].nan_to_num(7.0), found[1][name].nan_to_num(7.0)) for name in found[0])


@pytest.mark.prove
def test_ranks_settle_flat_rows_on_all_tokens() -> None:
    settings = ((1.0, 0, 0.9, 0.0), (1.0, 8300, 0.5, 0.0))
    made = sampling.inputs(normal(2, 8500, seed=7, scale=0.5), settings)
    assert on_ranks(made, 2) == [on_device(made)] * 2


def test_a_row_does_not_depend_on_the_others() -> None:
    made = sampling.inputs(normal(len(SEVERAL), 900, seed=9), SEVERAL)
    tokens = on_device(made)
    order = torch.randperm(len(SEVERAL), generator=torch.Generator().manual_seed(0))
    assert on_device({name: value[order] for name, value in made.items()}) == [tokens[i] for i in order]
    for row in (0, 1, 2, 5):
        assert on_device({name: value[row : row + 1] for name, value in made.items()}) == tokens[row : row + 1]


def test_rows_that_are_not_finite_are_flagged_and_draw_0() -> None:
    logits = normal(6, 400, seed=10)
    logits[1, 399], logits[2, 0], logits[3] = math.nan, math.inf, -math.inf
    logits[4, :399] = -math.inf
    finite = torch.empty(6, dtype=torch.bool, device=DEVICE)
    logprobs = torch.empty(6, device=DEVICE)
    for settings in (sampling.SETTINGS[:1], sampling.SETTINGS[1:2], sampling.SETTINGS[2:3]):
        made = sampling.inputs(logits, settings)
        tokens = on_device(made, finite=finite, logprobs=logprobs)
        assert finite.tolist() == [True, False, False, False, True, True]
        assert tokens[1:5] == [0, 0, 0, 399]
        assert logprobs.isnan().tolist() == [False, True, True, True, False, False]
        assert [tokens[0], tokens[5]] == [on_cpu(made)[0], on_cpu(made)[5]]


def test_logprobs_are_of_the_logits_as_given() -> None:
    made = sampling.inputs(normal(len(SEVERAL), 700, seed=11), SEVERAL)
    logprobs = torch.empty(len(SEVERAL), device=DEVICE)
    tokens = torch.tensor(on_device(made, logprobs=logprobs))
    expected = torch.log_softmax(made["logits"].double(), -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double().cpu(), expected, rtol=0, atol=2e-6)


@pytest.mark.prove  # the draws are those of the engine's sampler, whose frequencies are tested as well
@pytest.mark.parametrize("setting", [(1.5, 6, 1.0, 0.02), (1.0, 0, 1.0, 0.0), (0.7, 0, 0.8, 0.0)])
def test_frequencies_follow_the_distribution(setting: tuple[float, int, float, float]) -> None:
    """Pearson's statistic of many draws from one row stays under its 99.99% quantile (normal approximation)."""
    logits = normal(1, 140, seed=12, scale=1.5)
    made = sampling.inputs(logits.repeat(DRAWS, 1), [setting])
    made["seed"][:] = 5
    counts = torch.bincount(torch.tensor(on_device(made)), minlength=140).double()
    temperature, top_k, top_p, min_p = setting
    p = torch.softmax(logits[0].double() / temperature, -1)
    keep = p >= min_p * p.max()
    if top_k:
        keep &= p >= p.sort(descending=True).values[top_k - 1]
    p = p * keep / (p * keep).sum()
    ordered, order = p.sort(descending=True)
    p[order[ordered.cumsum(0) - ordered >= top_p]] = 0.0
    p = p / p.sum()
    assert not counts[p == 0].any()
    likely = p * DRAWS >= 5
    expected = torch.cat([p[likely], p[~likely].sum()[None]]) * DRAWS
    seen = torch.cat([counts[likely], counts[~likely].sum()[None]])
    statistic = float(((seen - expected)[expected > 0].square() / expected[expected > 0]).sum())
    freedom = int((expected > 0).sum()) - 1
    assert statistic < freedom + 3.72 * math.sqrt(2 * freedom) + 6


@pytest.mark.parametrize("dtype", quick_first([torch.float16, torch.bfloat16], 1))
def test_half_logits_and_strided_rows(dtype: torch.dtype) -> None:
    made = sampling.inputs(normal(8, 500, seed=13).to(dtype), sampling.SETTINGS)
    expected = on_cpu(made)
    assert on_device(made) == expected
    roomy = torch.full((8, 1003), math.nan, dtype=dtype)
    roomy[:, 3:503] = made["logits"]
    assert on_device(made | {"logits": roomy[:, 3:503]}) == expected
    roomy[:, ::2][:, :500] = made["logits"]
    assert on_device(made | {"logits": roomy[:, ::2][:, :500]}) == expected


def test_what_does_not_fit_is_refused() -> None:
    made = {name: value.to(DEVICE) for name, value in sampling.inputs(torch.zeros(2, 5), sampling.SETTINGS).items()}
    part = sampling.LogitShards(torch.zeros(4, 128), torch.zeros(2, dtype=torch.int64), 1, 200, lambda stats: stats)
    assert part.refusal(torch.zeros(4, 72)) is None
    assert "not [5, 72]" in part.refusal(torch.zeros(5, 72)) and "not [4, 73]" in part.refusal(torch.zeros(4, 73))
    assert "float32" in part.refusal(torch.zeros(4, 72, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"top_k must be .* \[2\]"):
        sampling.sample(**made | {"top_k": made["top_k"][:1]})
    with pytest.raises(ValueError, match=r"temperature must be torch\.float32"):
        sampling.sample(**made | {"temperature": made["temperature"].double()})
    with pytest.raises(ValueError, match="1 to"):
        sampling.sample(**made | {"logits": made["logits"][:, :0]})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("vocab", [128256, 151936])
@pytest.mark.parametrize("scale", [0.05, 2.5, 8.0])
def test_real_vocabularies_on_the_gpu_and_in_a_graph(vocab: int, scale: float) -> None:
    made = {k: v.cuda() for k, v in sampling.inputs(normal(64, vocab, seed=3, scale=scale), WIDE, seed=9).items()}
    out = torch.zeros(64, dtype=torch.int64, device="cuda")
    on_host = {name: value.cpu() for name, value in made.items()}
    assert on_device(made) == sampling.reference(**on_host).tolist()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampling.sample(**made, out=out)
    for seed in (4, 5):
        made["logits"].copy_(normal(64, vocab, seed=seed, scale=scale))
        made["position"] += 1
        graph.replay()
        on_host = {name: value.cpu() for name, value in made.items()}
        assert out.tolist() == sampling.reference(**on_host).tolist()


def test_knobs_change_no_draw() -> None:
    settings = WIDE[:8] if proving() or not INTERPRETED else FEW[1:5]
    made = sampling.inputs(normal(len(settings), 700, seed=4).to(DEVICE), settings)
    wanted = sampling.sample(**made)
    few = {"groups": 8, "warps": 2, "collected": 8, "block": 256, "choose_warps": 4}
    many = {"groups": 32, "warps": 8, "collected": 32, "block": 1024, "choose_warps": 16}
    assert all(torch.equal(sampling.sample(**made, config=config), wanted) for config in (few, many))
