r"""*Interviewer*: "Write me a dot product of two vectors of n float32 numbers on a GPU. How fast can it be?"

You begin with the bound, not with the code. *You*: "It reads 8 n bytes and does 2 n FLOPs, a quarter of a FLOP for
each byte. The card does 67 TFLOP/s and reads 3.35 TB/s, so it wants 20 FLOPs a byte before arithmetic matters.
This is bound by bytes: the time is 8 n over the bandwidth."

*Interviewer*: "And for small n?" *You*: "Then it is the launch, a few microseconds, and there are two launches:
one for partial sums, one that adds them."

*Interviewer*: "How many bytes must be in flight?" *You*: "Little's law: bandwidth times latency. At 3.35 TB/s and
600 ns that is 2 MB. Divide by the bytes that a thread has under way to know how many threads I need."

*Interviewer*: "What does a stride of s elements cost?" *You*: "Memory comes in sectors of 32 bytes, 8 floats. With
a stride of s I use one float in each min(s, 8), so the traffic grows by that factor and stops at 8."

*Interviewer*: "And bfloat16 sums?" *You*: "8 bits of significand: from 256 on, adding 1 changes nothing. Sum in
float32."

Every number of this dialogue is a function in the file. Write them; the grader asks with other numbers each time.
"""

from ...record import Case, Rung, Slip

SOLUTION = '''import math


def intensity(bytes_per_number):
    """FLOPs for each byte of a dot product of numbers of this size."""
    return 2 / (2 * bytes_per_number)


def seconds(n, bytes_per_number, flops_per_second, bytes_per_second, launch_seconds):
    """Time of a dot product of n numbers in two launches: launches, then the slower of arithmetic and memory."""
    work = max(2 * n / flops_per_second, 2 * n * bytes_per_number / bytes_per_second)
    return 2 * launch_seconds + work


def threads_needed(bytes_per_second, latency_seconds, bytes_in_flight_of_a_thread):
    """Threads that keep the memory busy (Little's law), rounded up to whole warps of 32."""
    threads = bytes_per_second * latency_seconds / bytes_in_flight_of_a_thread
    return 32 * math.ceil(threads / 32)


def traffic_factor(stride, bytes_per_number):
    """How many times more bytes move when neighbouring lanes read elements ``stride`` apart; sectors have 32 bytes."""
    return min(stride, 32 // bytes_per_number)


def stuck_at(significand_bits):
    """The smallest sum of ones, a power of two, that adding 1 does not change, with so many bits (the hidden one
    included) and rounding to even."""
    return 2**significand_bits
'''


def _seconds(n, size, flops, rate, launch):
    return 2 * launch + max(2 * n / flops, 2 * n * size / rate)


def _threads(rate, latency, each):
    return 32 * -int(-(rate * latency / each) // 32)


RUNG = Rung(
    name="interview_dot",
    title="Interview: how fast can a dot product be?",
    road="interview",
    place=1,
    kind="dialogue",
    minutes=30,
    after=("dot",),
    solution=SOLUTION,
    holes=("intensity", "seconds", "threads_needed", "traffic_factor", "stuck_at"),
    answers={
        "intensity": lambda size: 1 / size,
        "seconds": _seconds,
        "threads_needed": _threads,
        "traffic_factor": lambda stride, size: min(stride, 32 // size),
        "stuck_at": lambda bits: 2**bits,
    },
    tolerance=1e-6,
    cases=(
        Case("FLOPs for each byte", lambda rng: [int(rng.choice([2, 4, 8]))],
             "Two FLOPs (multiply, add) for two numbers read.", entry="intensity"),
        Case("a long vector", lambda rng: [int(rng.integers(1e9, 5e9)), 4, 67e12, 3.35e12, 0.0],
             "Bound by bytes: both vectors are read, 2 n numbers.", entry="seconds"),
        Case("a slow processor", lambda rng: [int(rng.integers(1e9, 5e9)), 4, 1e9, 3.35e12, 0.0],
             "The slower of arithmetic and memory decides: take the larger time.", entry="seconds"),
        Case("a short vector", lambda rng: [int(rng.integers(10, 1000)), 4, 67e12, 3.35e12,
                                               float(rng.uniform(2e-6, 9e-6))],
             "There are two launches: partial sums, and their sum.", entry="seconds"),
        Case("bytes in flight", lambda rng: [float(rng.uniform(1e12, 5e12)), float(rng.uniform(4e-7, 9e-7)), 64],
             "Little's law: bytes in flight = bandwidth * latency; warps have 32 threads.", entry="threads_needed"),
        Case("a small stride", lambda rng: [int(rng.integers(1, 8)), 4],
             "With stride s one of s elements of a sector is used.",
             entry="traffic_factor"),
        Case("a large stride", lambda rng: [int(rng.integers(40, 99)), int(rng.choice([2, 4]))],
             "It stops at one number a sector: 32 bytes over the size of a number.", entry="traffic_factor"),
        Case("sums of ones", lambda rng: [int(rng.choice([8, 11, 24]))],
             "With b bits all whole numbers up to 2^b are there; 2^b + 1 is not, and rounds back to even.", entry=
                 "stuck_at"),
    ),
    slips=(
        Slip(lambda size: 2 / size, "Two numbers are read for the two FLOPs, not one.", "intensity"),
        Slip(lambda n, size, flops, rate, launch: 2 * launch + n * size / rate,
             "Only one of the two vectors is counted.",
             "seconds"),
        Slip(lambda n, size, flops, rate, launch: launch + max(2 * n / flops, 2 * n * size / rate),
             "A sum over programs needs a second launch.", "seconds"),
        Slip(lambda n, size, flops, rate, launch: 2 * launch + 2 * n / flops + 2 * n * size / rate,
             "Arithmetic and memory work at the same time: take the larger, not the sum.", "seconds"),
        Slip(lambda stride, size: stride, "The factor stops when a sector holds one useful number.", "traffic_factor"),
    ),
    hints=("intensity = FLOPs / bytes = 2 / (2 * size).", "max(...) of the two times, plus two launches.",
           "bandwidth * latency / bytes of a thread, rounded up to a multiple of 32."),
    differences="`transect bench ops dot` measures it; `transect roofline` draws the bound of this machine.",
    shipped="ops/first/dot.py",
)  # fmt: skip
