r"""With plain data parallelism each of n GPUs holds all weights, all gradients and all of AdamW's states: 16 bytes a
weight, n times the same. *ZeRO* cuts what is the same n times. The states first (stage 1): rank r keeps m and v of
an n-th of the weights, and only that rank updates those.

What travels? All-reduce was reduce-scatter and all-gather. Put the update between the two halves:

    1. reduce-scatter the gradients: rank r gets the *sum* of its shard, and divides by n for the mean
    2. rank r updates its shard of the weights with its shard of the states
    3. all-gather the weights

The traffic is that of one all-reduce, nothing more, and the states are n times smaller. Stage 2 drops the rest of the
gradients, stage 3 (FSDP) keeps only a shard of the weights too and gathers each layer just before it is used.

Here a rank is a generator again. `shard = yield ("reduce_scatter", numbers)` gives rank r the sums of its shard,
and `whole = yield ("all_gather", shard)` all shards one after the other. Shards have one size: pad the list with
zeros to a multiple of n, and cut the padding off at the end. The update is SGD with momentum: `u <- momentum * u +
g` and `w <- w - lr * u`, where u is the state. The state must hold the rank's shard only; the grader counts its
numbers.
"""

from ...record import Case, Rung, Speed
from ..inputs import floats

SOLUTION = '''def shard_size(count, n):
    """Numbers in a shard: count / n, rounded up."""
    return -(-count // n)


def new_state(rank, n, count):
    """The state of one rank for ``count`` weights: the momentum of its shard."""
    return [0.0] * shard_size(count, n)


def train_step(rank, n, weights, gradients, state, lr, momentum):
    """A generator: ``shard = yield ("reduce_scatter", numbers)``, ``whole = yield ("all_gather", shard)``. Returns
    (all new weights, the new state of this rank) for the mean gradient over ranks."""
    size = shard_size(len(weights), n)
    padding = [0.0] * (n * size - len(weights))
    total = yield "reduce_scatter", [*gradients, *padding]
    own = [*weights, *padding][rank * size : (rank + 1) * size]
    state = [momentum * u + g / n for u, g in zip(state, total)]
    own = [w - lr * u for w, u in zip(own, state)]
    whole = yield "all_gather", own
    return whole[: len(weights)], state
'''


def _drive(module, weights, steps, lr, momentum):
    """Train on all ranks in lockstep: (weights of each rank, size of the largest state, numbers sent by a rank)."""
    n = len(steps[0])
    states = [module.new_state(rank, n, len(weights)) for rank in range(n)]
    held, sent = [list(weights) for _ in range(n)], 0
    for gradients in steps:
        ranks = [module.train_step(r, n, held[r], gradients[r], states[r], lr, momentum) for r in range(n)]
        mail = [None] * n
        while True:
            asked, ended = [], []
            for r, rank in enumerate(ranks):
                try:
                    asked.append(rank.send(mail[r]))
                except StopIteration as stop:
                    ended.append(stop.value)
            if ended:
                if asked:
                    return ["some ranks are done while others still communicate", 0, 0]
                held, states = [list(w) for w, _ in ended], [s for _, s in ended]
                break
            kinds = {kind for kind, _ in asked}
            lists = [list(numbers) for _, numbers in asked]
            if len(kinds) > 1 or len({len(each) for each in lists}) > 1:
                return ["all ranks must ask for the same, with lists of one size", 0, 0]
            size = len(lists[0])
            if kinds == {"reduce_scatter"}:
                if size % n:
                    return [f"reduce_scatter of {size} numbers over {n} ranks: pad to a multiple", 0, 0]
                sums = [sum(column) for column in zip(*lists, strict=True)]
                mail = [sums[r * size // n : (r + 1) * size // n] for r in range(n)]
                sent += size - size // n
            else:
                mail = [[number for each in lists for number in each] for _ in range(n)]
                sent += (n - 1) * size
    return [held, max(len(state) for state in states), sent]


def _judge(arguments, got):
    weights, steps, lr, momentum = arguments
    held, state, _ = got
    n = len(steps[0])
    if isinstance(held, str):
        return held
    want, u = list(weights), [0.0] * len(weights)
    for gradients in steps:
        mean = [sum(column) / n for column in zip(*gradients, strict=True)]
        u = [momentum * a + g for a, g in zip(u, mean, strict=True)]
        want = [w - lr * a for w, a in zip(want, u, strict=True)]
    for rank, values in enumerate(held):
        if len(values) != len(want):
            return f"rank {rank} returns {len(values)} weights instead of {len(want)}: cut the padding off"
        for i, (a, b) in enumerate(zip(values, want, strict=True)):
            if abs(a - b) > 1e-9 * max(1.0, abs(b)):
                return f"rank {rank}: weight {i} is {a:.6g} instead of {b:.6g}"
    if state > -(-len(weights) // n):
        return f"a rank keeps {state} numbers of state; its shard has {-(-len(weights) // n)}"
    return ""


def _make(rng, ranks, count, steps):
    return [floats(rng, count), [[floats(rng, count) for _ in range(ranks)] for _ in range(steps)], 0.1, 0.9]


RUNG = Rung(
    name="zero",
    title="ZeRO: each rank keeps a shard of the states",
    road="training",
    place=5,
    kind="python",
    minutes=60,
    after=("ring_all_reduce",),
    solution=SOLUTION,
    holes=("shard_size", "new_state", "train_step"),
    answers={"train": lambda *arguments: None},
    drives={"train": _drive},
    judges={"train": _judge},
    cases=(
        Case("one rank", lambda rng: _make(rng, 1, 5, 2),
             "Alone it is SGD with momentum: u <- momentum u + g, w <- w - lr u."),
        Case("2 ranks, one step", lambda rng: _make(rng, 2, 6, 1),
             "The sum over ranks is divided by n: gradients are means."),
        Case("4 ranks, 3 steps", lambda rng: _make(rng, 4, 16, 3),
             "The momentum of a shard must be kept from step to step: return it."),
        Case("3 ranks, 10 weights", lambda rng: _make(rng, 3, 10, 2),
             "10 is no multiple of 3: pad with zeros, and cut off at the end."),
        Case("5 ranks, 2 weights", lambda rng: _make(rng, 5, 2, 2), "Some ranks own nothing but padding."),
    ),
    speed=Speed(lambda rng: _make(rng, 8, 64, 1),
                "More numbers travel than in one all-reduce: gather the new weights' shards only, and the "
                "gradients' sums once.",
                measure=lambda arguments, got: got[2], unit="numbers sent by a rank", ratio=1.1),
    hints=("size = -(-count // n); pad gradients and weights with n * size - count zeros.",
           "total = yield \"reduce_scatter\", padded gradients; then divide by n.",
           "Update the shard rank * size .. (rank + 1) * size, and yield \"all_gather\", shard."),
    differences=
        "parallel/sharded.py shards weights too (stage 3), gathers a layer while the one before is computed, and drops "
    "it after use; a checkpoint is written shard by shard.",
    apart="the trainer shards by whole parameters and updates with its own optimizers, so no function of it has "
    "your generator's place (try parallel.zero = 1 in a run)",
    shipped="parallel/replicas.py",
)  # fmt: skip
