r"""The model gives one number for each word of its vocabulary, and somebody has to choose. The order of the steps
is what OpenAI's API and every engine agree on:

1. *Temperature*: divide the logits by it. Below 1 the likely ones gain, above 1 they lose. 0 means: take the
   largest.
2. *Top-k*: keep the k largest.
3. *Top-p*: sort by probability, and keep the fewest whose probabilities together reach p. The token that crosses
   the line stays; without it, p = 0.1 would often keep none.
4. Draw from what is left, with its probabilities scaled to 1.

How to draw? *Gumbel-max*: give each token the number log(p) + g with g = -log(-log(u)), u uniform in (0, 1), and
take the largest. That draws exactly from p, it needs no sum and no search, and on a GPU it is one pass. The grader
gives you u for each token, so the answer is unique.

In this package u is a function of (seed, choice, position, token) (a counter-based generator, Philox): nothing is
carried from step to step. That is why a preempted request repeats its own tokens, and why the same request gives
the same answer whatever else is in the batch.
"""

import math

from ...record import Case, Live, Rung, Slip, Speed

SOLUTION = '''import math


def kept(logits, temperature, top_k, top_p):
    """Tokens that may be drawn, likeliest first, with log-probabilities (of all tokens, at this temperature): a list
    of [token, logprob]. top_k 0: all; of equal logits the lower token goes first."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    largest = logits[order[0]] / temperature
    total = math.log(sum(math.exp(logit / temperature - largest) for logit in logits)) + largest
    found = [[token, logits[token] / temperature - total] for token in order[: top_k or None]]
    share, reached = sum(math.exp(logprob) for _, logprob in found), 0.0
    for count, (_, logprob) in enumerate(found, start=1):
        reached += math.exp(logprob)
        if reached >= top_p * share - 1e-12:
            return found[:count]
    return found


def draw(logits, temperature, top_k, top_p, uniform):
    """The token drawn with the numbers ``uniform``, one for each token, in (0, 1)."""
    if temperature == 0:
        return max(range(len(logits)), key=lambda token: (logits[token], -token))
    best, chosen = -math.inf, 0
    for token, logprob in kept(logits, temperature, top_k, top_p):
        score = logprob - math.log(-math.log(uniform[token]))
        if score > best:
            best, chosen = score, token
    return chosen
'''


def _kept(logits, temperature, top_k, top_p, crossing=True):
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    top = max(logits) / temperature
    total = math.log(math.fsum(math.exp(x / temperature - top) for x in logits)) + top
    found = [[token, logits[token] / temperature - total] for token in order[: top_k or len(order)]]
    share, reached, count = math.fsum(math.exp(lp) for _, lp in found), 0.0, 0
    while count < len(found) and reached < top_p * share - 1e-12:
        reached += math.exp(found[count][1])
        count += 1
    return found[: count if crossing else max(1, count - 1)]


def _draw(logits, temperature, top_k, top_p, uniform, keep=_kept):
    if temperature == 0:
        return max(range(len(logits)), key=lambda token: (logits[token], -token))
    scores = {token: lp - math.log(-math.log(uniform[token])) for token, lp in keep(logits, temperature, top_k, top_p)}
    return max(scores, key=lambda token: scores[token])


def _live(mine, shipped):
    """Draw rows with top-k or top-p by the student's function; u is made from the engine's own Gumbel noise."""

    def draw_random(z_BV, picks, scratch_BV=None):
        import torch

        from ....ops.lang.philox import TOKEN_STREAM, gumbel

        tokens, ids = [], torch.arange(z_BV.shape[1])[None]
        for row, pick in zip(z_BV, picks, strict=True):
            params = pick.draw.params
            if params.min_p > 0:
                tokens += shipped(row[None].clone(), [pick])
                continue
            noise = gumbel([pick.draw.seed], [pick.draw.choice], [pick.position], ids, TOKEN_STREAM)[0].double()
            uniform = (-(-noise).exp()).exp().clamp(5e-324, 1 - 2**-53).tolist()
            limits = max(params.top_k, 0), params.top_p
            tokens.append(mine.draw(row.tolist(), params.temperature, *limits, uniform))
        return tokens

    return draw_random


def _logits(rng, count):
    return [float(x) for x in rng.standard_normal(count) * 2]


def _make(rng, count, temperature, top_k, top_p):
    return [_logits(rng, count), temperature, top_k, top_p, [float(x) for x in rng.uniform(1e-6, 1 - 1e-6, count)]]


RUNG = Rung(
    name="sampler",
    title="The sampler: temperature, top-k, top-p, Gumbel-max",
    road="serving",
    place=2,
    kind="python",
    minutes=45,
    after=("tokenizer",),
    solution=SOLUTION,
    holes=("kept", "draw"),
    answers={"kept": _kept, "draw": _draw},
    tolerance=1e-8,
    cases=(
        Case("everything", lambda rng: [_logits(rng, 10), 1.0, 0, 1.0],
             "log p = logit - log of the sum of exp(logit), likeliest first."),
        Case("temperature 0.5", lambda rng: [_logits(rng, 10), 0.5, 0, 1.0],
             "Divide the logits by the temperature before softmax."),
        Case("large logits", lambda rng: [[900.0, 890.0, 10.0], 1.0, 0, 1.0],
             "exp(900) overflows: subtract the largest first."),
        Case("top 3", lambda rng: [_logits(rng, 20), 1.0, 3, 1.0],
             "Keep the 3 largest; log-probabilities stay those over all tokens."),
        Case("top-p 0.7", lambda rng: [_logits(rng, 20), 1.0, 0, 0.7], "The token that crosses p stays."),
        Case("top-p 0.01", lambda rng: [_logits(rng, 20), 1.0, 0, 0.01], "One token is always left."),
        Case("both", lambda rng: [_logits(rng, 30), 1.3, 8, 0.8], "Top-p counts shares of what top-k has left."),
        Case("greedy", lambda rng: _make(rng, 30, 0, 0, 1.0),
             "Temperature 0 takes the largest logit and draws nothing.", entry=
             "draw"),
        *(Case(f"draw {n}", lambda rng: _make(rng, 30, 1.0, 0, 1.0),
               "Score = log p - log(-log u), with the u of that token; take the largest.",
               entry="draw") for n in (1, 2, 3)),
        *(Case(f"draw {n} with limits", lambda rng: _make(rng, 40, 0.8, 10, 0.7),
               "Draw among what is kept only.", entry="draw") for n in (1, 2, 3)),
    ),
    slips=(
        Slip(lambda *a: _kept(*a, crossing=False), "The token that crosses p must stay."),
        Slip(lambda logits, t, k, p: _kept([x * t * t for x in logits], t, k, p),
             "The logits are multiplied by the temperature: divide."),
    ),
    speed=Speed(lambda rng: _make(rng, 400, 0.8, 40, 0.9),
                "Sort once, and take the sum once: not for every token.", entry="draw", ratio=2.0),
    hints=("Sort tokens by (-logit, token) first; everything else walks down that list.",
           "total = log(sum(exp(x / T - top))) + top; log p = x / T - total.",
           "Walk down the list and stop when the sum reaches top_p times the share that top-k has left."),
    differences=
        "The shipped sampler does it for a whole batch without sorting the vocabulary (a search for the threshold), "
    "with penalties, grammars and log-probabilities, on the device.",
    shipped="engine/executors/sampler.py",
    live=Live("serve", {"transect.engine.executors.sampler:draw_random": _live}, (),
              {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 1}),
)  # fmt: skip
