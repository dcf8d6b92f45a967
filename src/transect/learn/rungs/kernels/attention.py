r"""Each token asks a question (its *query* q), every token before it has a label (its *key* k) and something to say
(its *value* v). The token takes the mean of the values, weighted by how well label and question fit:

    s = q · k / sqrt(d)        p = softmax of s over the keys it may see        o = sum of p v

*Causal*: token i sees keys 0 to i. Set the scores of later ones to -infinity before the softmax. The factor 1 /
sqrt(d) keeps the scores at the size of one; without it a sum of d products grows like sqrt(d), and softmax becomes
a hard choice.

*Grouped queries*: H query heads share K key heads (H / K each). The KV cache, which serving must hold and read for
each token, becomes H / K times smaller, and the answers hardly worse. Query head h uses key head h // (H / K).

Here you may use torch's operators, but not its fused attention. Watch the memory: the scores are `[H, T, T]`. For
32 heads and 8,192 tokens in float32 they have 8.6 GB, written and read several times, for an input of a few
megabytes. That is what FlashAttention, the next rung, does away with. The grader counts bytes: do not repeat k and
v for each query head, because a view can give all heads of a group the same keys.
"""

import math

import torch

from ....costs.work import Cost
from ...record import Case, Rung, Slip, Speed
from ..inputs import normal

SOLUTION = '''import math

import torch


def attention(q, k, v):
    """q [T, H, d], k and v [T, K, d] with H a multiple of K -> [T, H, d]. Causal: token i sees tokens 0 to i."""
    T, H, d = q.shape
    K = k.shape[1]
    q = q.view(T, K, H // K, d).permute(1, 2, 0, 3)  # [K, H / K, T, d]
    k = k.permute(1, 2, 0)[:, None]  # [K, 1, d, T]
    v = v.permute(1, 0, 2)[:, None]  # [K, 1, T, d]
    scores = (q / math.sqrt(d)) @ k
    later = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    p = scores.masked_fill(later, -math.inf).softmax(-1)
    return (p @ v).permute(2, 0, 1, 3).reshape(T, H, d)
'''


def exact(q, k, v, causal=True, scale=None):
    """Compute attention in the dtype of its arguments, head by head."""
    T, H, d = q.shape
    group = H // k.shape[1]
    heads = []
    for h in range(H):
        s = q[:, h] @ k[:, h // group].T * (1 / math.sqrt(d) if scale is None else scale)
        if causal:
            s = s.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
        heads.append(s.softmax(-1) @ v[:, h // group])
    return torch.stack(heads, 1)


def _spread(q, k, v):
    order = [h % k.shape[1] for h in range(q.shape[1])]
    return exact(q, k[:, order], v[:, order])


def make(rng, tokens, heads, groups, d):
    """Generate q ``[tokens, heads, d]``, k and v ``[tokens, groups, d]``."""
    return [normal(rng, tokens, heads, d), normal(rng, tokens, groups, d), normal(rng, tokens, groups, d)]


def attention_cost(q, k, v):
    """Count two products over the visible half of the scores; each tensor read or written once."""
    T, H, d = q.shape
    return Cost(4 * H * d * T * (T + 1) / 2, q.nbytes + k.nbytes + v.nbytes, q.nbytes)


CASES = (
    Case("one token", lambda rng: make(rng, 1, 1, 1, 16), "A single token sees only itself: the result is its value."),
    Case("8 tokens, one head", lambda rng: make(rng, 8, 1, 1, 16),
         "Scores are q k / sqrt(d), and keys later than the query get -infinity before the softmax."),
    Case("4 heads", lambda rng: make(rng, 20, 4, 4, 32), "Every head is an attention of its own."),
    Case("grouped queries", lambda rng: make(rng, 20, 4, 2, 16), "Query head h uses key head h // (H / K)."),
    Case("37 tokens", lambda rng: make(rng, 37, 2, 1, 16), "37 is no multiple of any tile: mask queries and keys."),
    Case("large scores", lambda rng: [10 * x for x in make(rng, 24, 2, 2, 16)],
         "Subtract the largest score of each row before exp."),
)  # fmt: skip
SLIPS = (
    Slip(lambda q, k, v: exact(q, k, v, causal=False), "Tokens see later ones: mask keys j > i with -infinity."),
    Slip(lambda q, k, v: exact(q, k, v, scale=1.0), "The factor 1 / sqrt(d) on the scores is missing."),
    Slip(lambda q, k, v: exact(q, k, v, scale=1 / q.shape[2]), "Divide the scores by sqrt(d), not by d."),
    Slip(_spread, "Heads are grouped the wrong way: neighbours share a key head, so h // (H / K), not h % K."),
)  # fmt: skip

RUNG = Rung(
    name="attention",
    title="Causal attention with grouped queries",
    road="kernels",
    place=11,
    kind="torch",
    minutes=60,
    after=("softmax", "matmul_tiled", "rope"),
    solution=SOLUTION,
    holes=("attention",),
    answers={"attention": exact},
    cases=CASES,
    slips=SLIPS,
    forbids=("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu",
             "_scaled_dot_product_attention_math", "_scaled_dot_product_flash_attention",
             "_scaled_dot_product_efficient_attention"),
    speed=Speed(lambda rng: make(rng, 96, 8, 2, 32),
                "Keys and values are copied for every query head, or the scores are made more often than needed: "
                "give all heads "
                "of a group the same keys by a view.", attention_cost, ratio=1.4,
                peer=
                    "import torch\n\n\ndef attention(q, k, v):\n    q, k, v = (x.transpose(0, 1)[None] for x in "
                    "(q, k, v))\n"
                "    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)\n"
                "    return o[0].transpose(0, 1)\n"),
    hints=("View q as [T, K, H / K, d] and bring the heads to the front with permute.",
           "k and v get a dimension of 1 in place of H / K, and matmul repeats it without a copy.",
           "scores.masked_fill(later, -math.inf).softmax(-1) @ v"),
    differences="The package has two attentions: packed (training, whole prompts) and paged (through a block table).",
    shipped="ops/attention/packed/attention.py",
)  # fmt: skip
