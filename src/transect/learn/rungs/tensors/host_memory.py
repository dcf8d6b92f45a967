r"""A GPU has its own memory. It is fast (3 TB/s) and small (80 GB), and everything that comes from the host crosses
a link that is fifty times slower: PCIe 5 carries about 55 GB/s. A copy of n bytes takes

    latency + n / bandwidth

with a latency of some 10 microseconds. Small copies are all latency, and large ones all bandwidth. The two meet at
`latency * bandwidth` bytes, about half a megabyte here: below it, put copies together.

Host memory comes in two kinds. *Pageable* memory can be moved by the operating system at any time, so the driver
first copies it into a buffer of its own, and the program waits. *Pinned* memory stays where it is: the device reads
it directly, while the program continues. Then copying and computing can *overlap*: chunk 2 crosses the link while
chunk 1 is computed.

To overlap you need places to put chunks. With B buffers on the device, chunk i can be copied when chunk i - B is
computed, because that one's buffer is free then, and when the link is done with chunk i - 1. It can be computed
when it has arrived and chunk i - 1 is computed:

    copied[i]   = max(copied[i-1], computed[i-B]) + copy[i]
    computed[i] = max(computed[i-1], copied[i]) + compute[i]

The first B chunks wait for no buffer. With one buffer nothing overlaps. With two, the slower of the two decides
almost alone. That is double buffering, and you will meet it again in every fast kernel (from global to shared
memory), in the data loader, and where layers stream to a model that does not fit.
"""

from ...record import Case, Rung, Slip, Speed

SOLUTION = '''def transfer_seconds(size, latency, bandwidth):
    """Seconds of one copy of ``size`` bytes; nothing for none."""
    return latency + size / bandwidth if size else 0.0


def joined_gain(sizes, latency, bandwidth):
    """Seconds that are saved by sending all pieces in one copy instead of one copy each."""
    apart = sum(transfer_seconds(size, latency, bandwidth) for size in sizes)
    return apart - transfer_seconds(sum(sizes), latency, bandwidth)


def overlapped(copies, computes, buffers):
    """When the last chunk is computed, with so many buffers on the device. Lists of seconds, one for each chunk."""
    copied, computed = [], []
    for i, (copy, compute) in enumerate(zip(copies, computes)):
        link_free = copied[i - 1] if i else 0.0
        buffer_free = computed[i - buffers] if i >= buffers else 0.0
        copied.append(max(link_free, buffer_free) + copy)
        computed.append(max(computed[i - 1] if i else 0.0, copied[i]) + compute)
    return computed[-1] if computed else 0.0
'''


def _transfer(size, latency, bandwidth):
    return latency + size / bandwidth if size else 0.0


def _gain(sizes, latency, bandwidth):
    return sum(_transfer(s, latency, bandwidth) for s in sizes) - _transfer(sum(sizes), latency, bandwidth)


def _overlapped(copies, computes, buffers):
    copied, computed = [0.0], [0.0] * buffers
    for copy, compute in zip(copies, computes, strict=True):
        copied.append(max(copied[-1], computed[-buffers]) + copy)
        computed.append(max(computed[-1], copied[-1]) + compute)
    return computed[-1]


def _chunks(rng, count, buffers):
    return [[float(x) for x in rng.uniform(1, 3, count)], [float(x) for x in rng.uniform(1, 3, count)], buffers]


RUNG = Rung(
    name="host_memory",
    title="Host and device memory: copies that overlap",
    road="tensors",
    place=2,
    kind="python",
    minutes=30,
    after=("strides",),
    solution=SOLUTION,
    holes=("transfer_seconds", "joined_gain", "overlapped"),
    answers={"transfer_seconds": _transfer, "joined_gain": _gain, "overlapped": _overlapped},
    tolerance=1e-9,
    cases=(
        Case("a large copy", lambda rng: [int(rng.integers(1e8, 1e9)), 1e-5, 55e9],
             "Seconds are latency + bytes / bandwidth."),
        Case("no copy", lambda rng: [0, 1e-5, 55e9], "Nothing to copy costs nothing, not even the latency."),
        Case("16 small copies", lambda rng: [[int(x) for x in rng.integers(100, 9999, 16)], 1e-5, 55e9],
             "Together they pay the latency once: 15 latencies are saved.", entry="joined_gain"),
        Case("no pieces", lambda rng: [[], 1e-5, 55e9], "No pieces, no gain.", entry="joined_gain"),
        Case("one buffer", lambda rng: _chunks(rng, 6, 1),
             "With one buffer a chunk can be copied only when the chunk before is computed.", entry="overlapped"),
        Case("two buffers", lambda rng: _chunks(rng, 8, 2),
             "Chunk i may be copied when chunk i - 2 is computed and the link is free, whichever comes later.",
             entry="overlapped"),
        Case("three buffers", lambda rng: _chunks(rng, 12, 3),
             "The link is one queue and the processor is one queue: each takes its chunks in order.", entry=
                 "overlapped"),
        Case("no chunk", lambda rng: [[], [], 2], "No chunk is done at once.", entry="overlapped"),
    ),
    slips=(
        Slip(lambda copies, computes, buffers: sum(copies) + sum(computes),
             "This is the time without any overlap: with two buffers a copy runs while the chunk before is computed.",
             "overlapped"),
        Slip(lambda copies, computes, buffers: _overlapped(copies, computes, max(1, len(copies))),
             "This has a buffer for every chunk: chunk i must wait until chunk i - buffers is computed.", "overlapped"),
    ),
    speed=Speed(lambda rng: _chunks(rng, 100, 2),
                "One pass over the chunks is enough: keep when each was copied and computed.", entry="overlapped"),
    hints=("Keep two lists: when each chunk was copied, and when each was computed.",
           "A copy begins at max(link free, buffer free); a computation at max(processor free, chunk copied).",
           "The buffer of chunk i is free at computed[i - buffers] for i >= buffers, else at 0."),
    differences=
        "models/streaming/ does this for layers of a model that is larger than the GPU: pinned pieces, one slot "
    "ahead, events of CUDA streams in place of the two lists.",
    shipped="models/streaming/stream.py",
)  # fmt: skip
