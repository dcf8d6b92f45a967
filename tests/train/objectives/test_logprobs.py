"""Log-probabilities: the trainer's equal torch's, and the engine's to the last bit where that is promised."""

from collections.abc import Sequence

import pytest
import torch
from training_runs import tiny_run

from transect import LLM, SamplingParams
from transect.engine.executors.sampler import token_logprobs as engine_logprobs
from transect.models.context import PagedContext, VarlenContext
from transect.models.decoder import Decoder
from transect.ops.opset import OpSet, resolve_ops
from transect.train.data.batches import Batch
from transect.train.loop.trainer import Trainer
from transect.train.objectives import logprobs as module


@pytest.mark.parametrize("chunk", [1, 2**20])
def test_token_logprobs_and_gradients(monkeypatch, chunk: int) -> None:
    monkeypatch.setattr(module, "LOSS_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 6, generator=generator, dtype=torch.float64, requires_grad=True) for n in (9, 21))
    labels = torch.randint(0, 21, (9,), generator=generator)
    labels[3] = -100
    upstream = torch.randn(9, generator=generator, dtype=torch.float64)
    ours = module.token_logprobs(hidden, weight, labels)
    used = labels >= 0
    plain = (hidden @ weight.T).log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0] * used
    torch.testing.assert_close(ours, plain)
    for a, b in zip(
        torch.autograd.grad(ours, (hidden, weight), upstream),
        torch.autograd.grad(plain, (hidden, weight), upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_document_sums() -> None:
    sums = module.document_sums(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 1, 4], dtype=torch.int32))
    assert sums.tolist() == [1.0, 9.0]


@pytest.mark.parametrize("task", ["finetune", "lora"])
def test_the_trainer_and_the_engine_agree(tmp_path, task: str) -> None:
    """Train a little, serve the checkpoint, and compare with what the engine says about the same prompts."""
    torch.set_num_threads(1)
    trainer = Trainer(tiny_run(tmp_path, task=task, steps=3, optimizer={"learning_rate": 1e-2}))
    last = trainer.run()
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (5, 40, 17, 33)]
    llm = LLM(str(last), dtype="float32", native=False, max_num_seqs=3, max_num_batched_tokens=16, kv_cache_tokens=512)
    engine = [
        [entry[token].logprob for entry, token in zip(out.prompt_logprobs[1:], document[1:], strict=True)]
        for document, out in zip(
            documents,
            llm.generate(documents, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)),
            strict=True,
        )
    ]
    # The same model class over the same operators: with batch-invariant ones the bits agree.
    ops = resolve_ops("cpu", batch_invariant=True)
    served = Trainer(tiny_run(tmp_path, model=str(last), run_dir=str(tmp_path / "other"))).model
    _use(served, ops)
    for ours, theirs in zip(serving_logprobs(served, documents, ops), engine, strict=True):
        assert ours == theirs
    # And the training forward pass, packed and with other kernels, is close.
    tokens = torch.tensor([token for document in documents for token in document])
    bounds = torch.tensor([0, *(len(d) for d in documents)]).cumsum(0, dtype=torch.int32)
    labels = torch.cat([torch.tensor([*d[1:], -100]) for d in documents])
    positions = VarlenContext(bounds, trainer.model.ops).positions()
    packed = module.batch_logprobs(trainer.model, Batch(tokens, labels, positions, bounds, 91, 40))
    flat = torch.tensor([value for values in engine for value in values])
    torch.testing.assert_close(packed[labels >= 0].detach(), flat, atol=2e-4, rtol=1e-4)


@torch.inference_mode()
def serving_logprobs(model: Decoder, documents: Sequence[Sequence[int]], ops: OpSet) -> list[list[float]]:
    """Compute, for each document, the log-probability of every token but its first, as an engine with ``ops`` does.

    The same model runs over a paged cache of its own, as it does when it serves. With a batch-invariant ``ops`` the
    numbers equal the engine's prompt logprobs to the last bit, whatever the engine's batches were.
    """
    device, dtype = model.norm.weight.device, model.norm.weight.dtype
    lengths = [len(document) for document in documents]
    counts = [-(-length // 16) for length in lengths]
    caches = model.new_kv_cache(sum(counts), 16, dtype)
    tables = torch.zeros(len(documents), max(counts), dtype=torch.int32, device=device)
    first = 0
    for row, count in enumerate(counts):
        tables[row, :count] = torch.arange(first, first + count)
        first += count
    sizes = torch.tensor(lengths, dtype=torch.int32, device=device)
    starts = torch.nn.functional.pad(sizes.cumsum(0, dtype=torch.int32), (1, 0))
    context = PagedContext(*caches, tables, starts, sizes, ops)
    flat = [token for document in documents for token in document]
    hidden_TD = model(torch.tensor(flat, device=device), context.positions(), context)
    found = []
    for start, length in zip(starts.tolist(), lengths, strict=False):
        values: list[float] = []
        for at in range(start, start + length - 1, 32):
            end = min(at + 32, start + length - 1)
            entries = engine_logprobs(model.logits(hidden_TD[at:end]), flat[at + 1 : end + 1], [0] * (end - at))
            values.extend(entry.logprob for entry in entries)
        found.append(values)
    return found


def _use(model, ops) -> None:
    """Make a model compute with another set of operators, as if it had been built with them."""
    model.ops = ops
    for module_ in model.modules():
        kind = type(module_).__name__
        if kind == "Dense":
            module_.ops = ops
        elif kind == "RMSNorm":
            module_.op = ops.rms_norm
        elif kind == "Attention":
            module_.rotary = ops.rotary
        elif kind == "MLP":
            module_.swiglu = ops.swiglu


def test_rollouts_report_the_log_probabilities_that_the_trainer_computes(tmp_path) -> None:
    from transect.train.objectives.rollout import roll_out

    torch.set_num_threads(1)
    trainer = Trainer(tiny_run(tmp_path))
    prompts = [[3, 4, 5], [60, 61, 62, 63, 64, 65]]
    params = SamplingParams(n=3, max_tokens=6, temperature=1.3)
    answers = roll_out(trainer.model, prompts, params, eos_token_ids=(257,), seed=5)
    assert [a.prompt for a in answers] == [0, 0, 0, 1, 1, 1]
    assert len({a.token_ids for a in answers}) > 1
    assert answers == roll_out(trainer.model, prompts, params, eos_token_ids=(257,), seed=5)
    for answer in answers:
        whole = torch.tensor([*prompts[answer.prompt], *answer.token_ids])
        bounds = torch.tensor([0, len(whole)], dtype=torch.int32)
        labels = torch.cat([whole[1:], torch.tensor([-100])])
        batch = Batch(whole, labels, torch.arange(len(whole)), bounds, len(whole) - 1, len(whole))
        ours = module.batch_logprobs(trainer.model, batch)[len(prompts[answer.prompt]) - 1 : -1]
        torch.testing.assert_close(ours.detach(), torch.tensor(answer.logprobs), atol=1e-4, rtol=1e-4)
