r"""Eight GPUs train one model: each has the whole model and an eighth of the batch. After the backward pass each has
other gradients, and all need their sum. That is *all-reduce*. If each sends its gradients to everybody, every GPU
sends (n - 1) N numbers. If one collects and hands out, that one is the bottleneck.

*Ring*: cut the N numbers into n chunks, and think of the ranks in a circle. In step s rank r sends chunk (r - s)
mod n to its right neighbour and receives chunk (r - s - 1) mod n from the left, which it *adds* to its own. After
n - 1 steps rank r has the complete sum of chunk (r + 1) mod n. That is *reduce-scatter*. Then n - 1 steps more in
which complete chunks go around and are *copied*: *all-gather*. Each rank sends 2 (n - 1) / n * N numbers, less
than 2 N, for any number of ranks. No algorithm sends less, and all links are busy all the time.

Here a rank is a Python generator: `received = yield (to, numbers)` sends a list to rank `to`, and continues when a
list has come from its left neighbour. The grader runs all ranks in lockstep, and counts the numbers that each
sends.

With the halves apart you have two tools that ZeRO, two rungs from here, is made of.
"""

from ...record import Case, Live, Rung, Speed
from ..inputs import floats

SOLUTION = '''def chunk_bounds(n, size):
    """Begins of n chunks of a list of ``size`` numbers, and its end: n + 1 numbers; sizes differ by at most 1."""
    return [i * size // n for i in range(n + 1)]


def all_reduce(rank, n, values):
    """A generator: ``received = yield (to, numbers)`` sends a list and waits for one. Returns the sums
    over all ranks."""
    values = list(values)
    edges = chunk_bounds(n, len(values))
    right = (rank + 1) % n
    for step in range(n - 1):
        send, take = (rank - step) % n, (rank - step - 1) % n
        received = yield right, values[edges[send] : edges[send + 1]]
        for i, number in enumerate(received, start=edges[take]):
            values[i] += number
    for step in range(n - 1):
        send, take = (rank + 1 - step) % n, (rank - step) % n
        received = yield right, values[edges[send] : edges[send + 1]]
        values[edges[take] : edges[take + 1]] = received
    return values
'''


def _drive(module, lists):
    """Run all ranks in lockstep: (results, numbers sent by the busiest rank)."""
    n = len(lists)
    ranks = [module.all_reduce(rank, n, values) for rank, values in enumerate(lists)]
    results, sent = [None] * n, [0] * n
    mail = [None] * n
    active = set(range(n))
    for _ in range(10 * n * n + 10):
        outgoing = {}
        for rank in sorted(active):
            try:
                to, numbers = ranks[rank].send(mail[rank])
                if to in outgoing:
                    return ["two ranks send to one in the same step", 0]
                outgoing[to] = list(numbers)
                sent[rank] += len(outgoing[to])
            except StopIteration as stop:
                results[rank] = None if stop.value is None else list(stop.value)
                active.discard(rank)
        if not active:
            return [results, max(sent)]
        mail = [outgoing.get(rank) for rank in range(n)]
        if any(mail[rank] is None for rank in active):
            return ["a rank waits for a message that nobody sends", 0]
    return ["it does not end", 0]


def _judge(arguments, got):
    (lists,) = arguments
    results, _ = got
    if isinstance(results, str):
        return results
    want = [sum(column) for column in zip(*lists, strict=True)]
    for rank, values in enumerate(results):
        if values is None or len(values) != len(want):
            return f"rank {rank} returns {None if values is None else len(values)} numbers instead of {len(want)}"
        for i, (a, b) in enumerate(zip(values, want, strict=True)):
            if abs(a - b) > 1e-9 * max(1.0, abs(b)):
                return f"rank {rank} has {a:.6g} at {i}, and the sum over all ranks is {b:.6g}"
    return ""


def _live(mine, shipped):
    """Sum a tensor over the ranks of a group, in its place, by the student's generator; lengths go first."""
    import torch

    def all_reduce(group, x):
        if group.group is None:
            return x
        ring, came, left = mine.all_reduce(group.rank, group.size, x.flatten().tolist()), None, group.rank - 1
        while True:
            try:
                to, numbers = ring.send(came)
            except StopIteration as stop:
                x.copy_(torch.tensor(stop.value, dtype=x.dtype).view_as(x))
                return x
            out, length = torch.tensor(numbers, dtype=torch.float64), torch.tensor([len(numbers)])
            sent = [group.send(length, to), group.send(out, to) if numbers else None]
            size = int(group.receive(torch.empty(1, dtype=torch.int64), left % group.size))
            values = torch.empty(size, dtype=torch.float64)
            came = (group.receive(values, left % group.size) if size else values).tolist()
            for work in sent:
                if work is not None:
                    work.wait()

    return all_reduce


def _live_start(mine, shipped):
    def start_all_reduce(group, x):
        _live(mine, shipped)(group, x)

    return start_all_reduce


def _make(rng, ranks, size):
    return [[floats(rng, size) for _ in range(ranks)]]


RUNG = Rung(
    name="ring_all_reduce",
    title="All-reduce in a ring",
    road="training",
    place=3,
    kind="python",
    minutes=60,
    after=("adamw",),
    solution=SOLUTION,
    holes=("chunk_bounds", "all_reduce"),
    answers={"ring": lambda lists: None},
    drives={"ring": _drive},
    judges={"ring": _judge},
    cases=(
        Case("2 ranks", lambda rng: _make(rng, 2, 8),
             "With two ranks: send one half and add the other, then exchange the sums."),
        Case("4 ranks", lambda rng: _make(rng, 4, 12),
             "In step s send chunk (r - s) mod n and add what comes to chunk (r - s - 1) mod n; then n - 1 steps "
             "of copying."),
        Case("3 ranks, 10 numbers", lambda rng: _make(rng, 3, 10),
             "Chunks may differ in size by one: use i * size // n."),
        Case("5 ranks, 3 numbers", lambda rng: _make(rng, 5, 3), "Some chunks are empty: send them all the same."),
        Case("one rank", lambda rng: _make(rng, 1, 4), "A rank alone sends nothing and has the sum already."),
    ),
    speed=Speed(lambda rng: _make(rng, 8, 64),
                "Each rank sends more than 2 (n - 1) / n of the numbers: send chunks, and each sum once.",
                measure=lambda arguments, got: got[1], unit="numbers sent by the busiest rank", ratio=1.1),
    hints=("edges = [i * size // n for i in range(n + 1)] are the chunks' ends.",
           "The first n - 1 steps add, the second n - 1 copy; both send to (rank + 1) % n.",
           "After the first half rank r has the complete chunk (r + 1) % n: that goes first in the second half."),
    differences=
        "Between processes of one host the package reduces in shared memory (parallel/shared_sums.py); between GPUs it "
    "leaves this to NCCL, or to kernels that read each other's memory.",
    live=Live("train", {"transect.parallel.group:Group.all_reduce": _live,
                        "transect.parallel.group:Group.start_all_reduce": _live_start}, (),
              {"accumulate": 2, "parallel": {"data": 2}}),
    shipped="parallel/shared_sums.py",
)  # fmt: skip
