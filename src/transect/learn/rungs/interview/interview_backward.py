r"""*Interviewer*: "What happens when you call loss.backward()?"

*You*: "The forward pass has left a graph: each result knows the function that made it and what that function kept.
backward walks it from the loss to the leaves, each node once, when all slopes at its output have come, and adds
what comes to each leaf's grad."

*Interviewer*: "For a linear layer, how many FLOPs?" *You*: "Forward is 2 T I O. Backward has two products of that
size, dX = dY W and dW = dY^T X, so 4 T I O: twice. A step is 6 FLOPs for each weight and token."

*Interviewer*: "So how long does a step of an 8-billion model take?" *You*: "6 N T FLOPs over what the GPUs do; at
40% of 989 TFLOP/s (the *MFU*), a million tokens on 8 GPUs take 15 seconds."

*Interviewer*: "And memory?" *You*: "Mixed precision with AdamW: 2 bytes of weight, 2 of gradient, and 12 of
float32 master, m and v: 16 a weight. ZeRO over n ranks divides the 12 (stage 1), then the gradients too (stage 2),
then everything (stage 3). Activations come on top."

*Interviewer*: "They do not fit." *You*: "Checkpointing: keep only each layer's input, and compute the layer again
in the backward pass. One more forward: 8 FLOPs a weight and token in place of 6, a third more."

*Interviewer*: "Then gradients explode." *You*: "Clip by the global norm: one norm over all gradients, and one
factor for all."
"""

from ...record import Case, Rung, Slip

SOLUTION = '''import math


def step_flops(weights, tokens, checkpointing):
    """FLOPs of forward and backward; with checkpointing the forward pass is computed twice."""
    return (8 if checkpointing else 6) * weights * tokens


def step_seconds(weights, tokens, gpus, flops_per_second, mfu):
    """Seconds of a step without checkpointing, at this share of the peak of each GPU."""
    return step_flops(weights, tokens, False) / (gpus * flops_per_second * mfu)


def bytes_per_weight(ranks, stage):
    """Bytes a weight on each rank with AdamW in mixed precision: 2 weight, 2 gradient, 12 states; ZeRO stage 0 to 3."""
    weight, gradient, states = 2, 2, 12
    states = states / ranks if stage >= 1 else states
    gradient = gradient / ranks if stage >= 2 else gradient
    weight = weight / ranks if stage >= 3 else weight
    return weight + gradient + states


def kept_bytes(tokens, width, layers, bytes_per_number):
    """Activations that checkpointing keeps: the input of each layer."""
    return tokens * width * layers * bytes_per_number


def clipped(gradients, most):
    """Lists of numbers scaled by one factor, so that their joint 2-norm is at most ``most``; unchanged if it is."""
    norm = math.sqrt(sum(g * g for gradient in gradients for g in gradient))
    factor = min(1.0, most / norm) if norm else 1.0
    return [[factor * g for g in gradient] for gradient in gradients]
'''


def _bytes(ranks, stage):
    return (2 / ranks if stage >= 3 else 2) + (2 / ranks if stage >= 2 else 2) + (12 / ranks if stage >= 1 else 12)


def _clipped(gradients, most):
    norm = sum(g * g for gradient in gradients for g in gradient) ** 0.5
    factor = min(1.0, most / norm) if norm else 1.0
    return [[float(factor * g) for g in gradient] for gradient in gradients]


def _apart(gradients, most):
    return [_clipped([gradient], most)[0] for gradient in gradients]


def _lists(rng, scale):
    return [[[float(scale * x) for x in rng.standard_normal(4)] for _ in range(3)], 1.0]


def _sizes(rng):
    return [int(rng.integers(1e8, 7e10)), int(rng.integers(1e4, 4e6))]


RUNG = Rung(
    name="interview_backward",
    title="Interview: what does loss.backward() cost?",
    road="interview",
    place=2,
    kind="dialogue",
    minutes=30,
    after=("autograd", "zero"),
    solution=SOLUTION,
    holes=("step_flops", "step_seconds", "bytes_per_weight", "kept_bytes", "clipped"),
    answers={
        "step_flops": lambda n, t, again: (8 if again else 6) * n * t,
        "step_seconds": lambda n, t, gpus, rate, mfu: 6 * n * t / (gpus * rate * mfu),
        "bytes_per_weight": lambda ranks, stage: float(_bytes(ranks, stage)),
        "kept_bytes": lambda t, w, n, size: t * w * n * size,
        "clipped": _clipped,
    },
    tolerance=1e-9,
    cases=(
        Case("FLOPs of a step", lambda rng: [*_sizes(rng), False],
             "2 for each weight and token forward, twice that backward.", entry="step_flops"),
        Case("with checkpointing", lambda rng: [*_sizes(rng), True], "One forward pass more: 2 again.", entry=
             "step_flops"),
        Case("seconds of a step", lambda rng: [*_sizes(rng), 8, 989e12, float(rng.uniform(0.2, 0.6))],
             "FLOPs over GPUs * peak * MFU.", entry="step_seconds"),
        Case("memory, alone", lambda rng: [8, 0], "2 + 2 + 12 = 16 bytes a weight.", entry="bytes_per_weight"),
        *(Case(f"memory, stage {stage}", lambda rng, stage=stage: [int(rng.integers(2, 65)), stage],
               "Stage 1 cuts the 12 bytes of states, stage 2 the gradients too, stage 3 the weights too.",
               entry="bytes_per_weight") for stage in (1, 2, 3)),
        Case("kept activations", lambda rng: [int(rng.integers(1000, 9000)), 4096, 32, 2],
             "Tokens * width * layers * bytes: one input a layer.", entry="kept_bytes"),
        Case("large gradients", lambda rng: _lists(rng, 10.0), "One norm over all, and one factor for all.", entry=
             "clipped"),
        Case("small gradients", lambda rng: _lists(rng, 0.01), "Clipping never makes gradients larger.", entry=
             "clipped"),
    ),
    slips=(
        Slip(lambda n, t, again: (4 if again else 2) * n * t,
             "This is the forward pass alone: the backward costs twice as much.",
             "step_flops"),
        Slip(lambda n, t, again: (6 if again else 4) * n * t,
             "This is the backward pass alone, or a forward counted as equal to it.",
             "step_flops"),
        Slip(lambda n, t, gpus, rate, mfu: 6 * n * t * mfu / (gpus * rate),
             "A lower MFU makes a step longer: divide by it.",
             "step_seconds"),
        Slip(lambda ranks, stage: (16 / ranks if stage else 16.0), "This is stage 3: stages 1 and 2 cut only a part.",
             "bytes_per_weight"),
        Slip(_apart, "Each tensor is clipped by itself: take one norm over all gradients.", "clipped"),
    ),
    hints=("6 N T, or 8 N T with checkpointing.", "Divide only what the stage cuts by the number of ranks.",
           "factor = min(1, most / norm), one for all lists."),
    differences="`transect plan training` does these sums for a real model and machine, `transect memory` the bytes.",
    shipped="costs/training.py",
)  # fmt: skip
