r"""*Interviewer*: "Serve a 70-billion model to 10,000 users. What do you buy?"

*You*: "First, what do users do? Say each asks once in five minutes, prompts of 1,000 tokens, answers of 300. That
is 33 requests a second, 33,000 prompt tokens and 10,000 answer tokens each second."

*Interviewer*: "Memory?" *You*: "Weights in bfloat16 are 140 GB, two 80 GB cards at least; I take eight with tensor
parallelism. KV: 2 * layers * KV heads * head size * 2 bytes, for Llama-3 70B 2 * 80 * 8 * 128 * 2 = 320 KB a
token. How many tokens are there at once? *Little's law*: requests at the same time = rate * time that each takes."

*Interviewer*: "How fast is a decode step?" *You*: "It reads all weights once, and the KV of everybody in the
batch: bytes over bandwidth. One sequence is as slow as a hundred, so the batch must be large. In FLOPs a step with
B sequences is 2 N B, and the larger of the two times counts."

*Interviewer*: "And prompts?" *You*: "Those are bound by arithmetic: 2 N FLOPs a token. At half of 8 * 989 TFLOP/s
that is 28,000 tokens a second for a node; the prompts alone need 1.2 nodes. A prefix cache takes off what is
shared."

*Interviewer*: "So how many nodes?" *You*: "The time of a second's work, prompts and decodes together, over what a
node has (and I plan for 70% of it), rounded up. And one more, for the day when one fails."
"""

from ...record import Case, Rung, Slip

SOLUTION = '''import math


def requests_per_second(users, seconds_between):
    """Requests a second of users who each ask once in so many seconds."""
    return users / seconds_between


def kv_bytes_per_token(layers, kv_heads, head_size, bytes_per_number):
    """Bytes of keys and values of a token over all layers."""
    return 2 * layers * kv_heads * head_size * bytes_per_number


def at_the_same_time(rate, seconds_each):
    """Requests that are being answered at one moment (Little's law)."""
    return rate * seconds_each


def decode_seconds(weights, bytes_per_weight, batch, context, kv_bytes, flops_per_second, bytes_per_second):
    """Time of a step that draws one token for each of ``batch`` sequences of ``context`` tokens: the larger of memory
    and arithmetic (the attention's FLOPs left out)."""
    memory = (weights * bytes_per_weight + batch * context * kv_bytes) / bytes_per_second
    return max(memory, 2 * weights * batch / flops_per_second)


def largest_batch(memory_bytes, weights, bytes_per_weight, context, kv_bytes):
    """Sequences whose KV fits beside the weights; 0 if the weights do not fit."""
    return max(0, math.floor((memory_bytes - weights * bytes_per_weight) / (context * kv_bytes)))


def nodes(rate, prompt, answer, prefill_tokens_per_second, batch, step_seconds, share):
    """Nodes for ``rate`` requests a second: a node's seconds for prompts and for answers (in steps of ``batch``)
    added up, at ``share`` of a node's time, rounded up, and one more in case one fails."""
    busy = rate * prompt / prefill_tokens_per_second + rate * answer / batch * step_seconds
    return math.ceil(busy / share) + 1
'''


def _decode(weights, size, batch, context, kv, flops, rate):
    return max((weights * size + batch * context * kv) / rate, 2 * weights * batch / flops)


def _nodes(rate, prompt, answer, prefill, batch, step, share, spare=1):
    busy = rate * prompt / prefill + rate * answer / batch * step
    return -int(-busy / share // 1) + spare


def _model(rng):
    return [int(rng.integers(5e10, 9e10)), int(rng.choice([1, 2]))]


def _load(rng):
    return [float(rng.uniform(20, 90)), 1000, 300, float(rng.uniform(2e4, 4e4)), int(rng.integers(64, 200)),
            float(rng.uniform(0.02, 0.06)), 0.7]  # fmt: skip


RUNG = Rung(
    name="interview_serving",
    title="Interview: a 70-billion model for 10,000 users",
    road="interview",
    place=3,
    kind="dialogue",
    minutes=40,
    after=("scheduler", "router"),
    solution=SOLUTION,
    holes=("requests_per_second", "kv_bytes_per_token", "at_the_same_time", "decode_seconds", "largest_batch", "nodes"),
    answers={
        "requests_per_second": lambda users, between: float(users / between),
        "kv_bytes_per_token": lambda layers, heads, size, each: 2 * layers * heads * size * each,
        "at_the_same_time": lambda rate, each: float(rate * each),
        "decode_seconds": _decode,
        "largest_batch": lambda memory, n, size, context, kv: max(0, int((memory - n * size) // (context * kv))),
        "nodes": _nodes,
    },
    tolerance=1e-9,
    cases=(
        Case("requests", lambda rng: [int(rng.integers(1e3, 1e5)), int(rng.integers(60, 900))],
             "Users over seconds between questions.",
             entry="requests_per_second"),
        Case("KV of a token", lambda rng: [int(rng.integers(16, 99)), 8, 128, int(rng.choice([1, 2]))],
             "Keys and values: a factor of 2; KV heads, not query heads.", entry="kv_bytes_per_token"),
        Case("at the same time", lambda rng: [float(rng.uniform(5, 99)), float(rng.uniform(3, 30))],
             "Little's law: rate times time.", entry="at_the_same_time"),
        Case("a small batch", lambda rng: [*_model(rng), 4, 2000, 320_000, 3.9e15, 2.7e13],
             "Memory decides: all weights once, and the KV of each sequence.", entry="decode_seconds"),
        Case("a large batch", lambda rng: [*_model(rng), 4000, 10, 320_000, 3.9e15, 2.7e13],
             "Arithmetic decides: 2 FLOPs for each weight and sequence; the larger time counts.", entry=
                 "decode_seconds"),
        Case("room for KV", lambda rng: [640_000_000_000, *_model(rng), 2000, 320_000],
             "What the weights leave, over the KV of a whole sequence, rounded down.", entry="largest_batch"),
        Case("too little memory", lambda rng: [48_000_000_000, 70_000_000_000, 2, 2000, 320_000],
             "Weights that do not fit leave room for nobody: 0, not less.", entry="largest_batch"),
        Case("nodes", _load,
             "Add the seconds for prompts and for answers, divide by the share, round up, one to spare.", entry=
             "nodes"),
    ),
    slips=(
        Slip(lambda layers, heads, size, each: layers * heads * size * each, "Keys and values are two: a factor of 2.",
             "kv_bytes_per_token"),
        Slip(lambda n, s, b, c, kv, f, r: _decode(n, s, 1, c, kv, f, r),
             "The KV of one sequence is counted, not that of all in the batch.",
             "decode_seconds"),
        Slip(lambda n, s, b, c, kv, f, r: (n * s * b + b * c * kv) / r,
             "A step reads the weights once for the whole batch.",
             "decode_seconds"),
        Slip(lambda *a: _nodes(*a, spare=0), "There is no node to spare for the day when one fails.", "nodes"),
    ),
    hints=("Two for keys and values.", "max(memory time, arithmetic time) for a decode step.",
           "busy = rate * prompt / prefill rate + rate * answer / batch * step; ceil(busy / share) + 1."),
    differences="`transect memory llama-3.1-70b` and `transect plan` do it with the package's cost model.",
    shipped="costs/serving.py",
)  # fmt: skip
