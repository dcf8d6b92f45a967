"""The decoder on a GPU against transformers on the CPU: tiny random models of every family, prompts in chunks."""

import pytest
import torch
from tiny_checkpoints import FAMILIES, make_model

from transect.checkpoints.load import load_on_device
from transect.checkpoints.resolve import resolve
from transect.engine.executors.gpu.setup import gpu_ops
from transect.models.context import PagedContext

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
BLOCK, CHUNK = 16, 7
PROMPTS = [[(7 * i + 3) % 96 for i in range(37)], [5, 4, 3, 2, 1]]


def logits_on_gpu(model, dtype):
    """The values of every token of both prompts, computed in one ragged batch a chunk."""
    k_cache, v_cache = (cache.fill_(torch.nan) for cache in model.new_kv_cache(16, BLOCK, dtype))
    tables = torch.tensor([[3, 1, 9], [4, 0, 0]], dtype=torch.int32, device="cuda")
    found = [[], []]
    for first in range(0, 37, CHUNK):
        parts = [(row, prompt[first : first + CHUNK]) for row, prompt in enumerate(PROMPTS) if first < len(prompt)]
        tokens = torch.tensor([token for _, part in parts for token in part], device="cuda")
        starts = torch.tensor([0, *(len(part) for _, part in parts)], device="cuda").cumsum(0, dtype=torch.int32)
        lengths = torch.tensor([first + len(part) for _, part in parts], dtype=torch.int32, device="cuda")
        rows = torch.tensor([row for row, _ in parts], device="cuda")
        context = PagedContext(k_cache, v_cache, tables[rows], starts, lengths, model.ops)
        logits = model.logits(model(tokens, context.positions(), context)).cpu()
        for (row, _), part in zip(parts, logits.split(starts.diff().tolist()), strict=True):
            found[row].append(part)
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_logits(family, deterministic, tmp_path):
    reference = make_model(family)
    reference.save_pretrained(tmp_path)
    source = resolve(str(tmp_path))
    exact = [reference(torch.tensor([prompt])).logits[0].float() for prompt in PROMPTS]
    half = make_model(family).to(torch.bfloat16).cuda()
    halves = [half(torch.tensor([prompt], device="cuda")).logits[0].float().cpu() for prompt in PROMPTS]
    ops = gpu_ops(torch.device("cuda"), deterministic=deterministic)
    for dtype in (torch.float32, torch.bfloat16):
        model = load_on_device(source, device=torch.device("cuda"), dtype=dtype, ops=ops, max_positions=128)
        for ours, theirs, theirs_half in zip(logits_on_gpu(model, dtype), exact, halves, strict=True):
            error = float((ours - theirs).norm() / theirs.norm())
            if dtype is torch.float32:
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
            else:
                assert error <= 2 * float((theirs_half - theirs).norm() / theirs.norm())
