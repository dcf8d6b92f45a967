"""Mixtures of experts: served through ``LLM``, saved, cut into shards, in 4 bits, on the fused stack."""

import pytest
import torch
import transformers
from tiny_llm import EOS, VOCAB, save_tiny_llm_text

from transect import LLM, SamplingParams
from transect.checkpoints.load import load_model
from transect.checkpoints.resolve import resolve
from transect.costs.model import least_products
from transect.costs.storage import Storage
from transect.costs.work import expert_cost
from transect.models.context import PagedContext, VarlenContext
from transect.models.decoder import Decoder
from transect.models.fused_stack import FusedStack
from transect.models.moe import SharedRouter
from transect.models.weights.packed import Packed
from transect.ops.cpu import library as cpu_library
from transect.ops.moe import gating
from transect.ops.opset import resolve_ops
from transect.spec.model import ModelConfig
from transect.spec.moe import MoEConfig
from transect.spec.weights import parameter_count, weight_shapes

CONFIG = ModelConfig(
    architecture="qwen3_moe", vocab_size=61, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=48,
    max_position=64, qk_norm=True, moe=MoEConfig(6, 2, 16),
)  # fmt: skip


def drawn(config=CONFIG, **options):
    return Decoder(config, dtype=torch.float32, **options).init_weights(0.3, torch.Generator().manual_seed(0))


def logits(model, *documents):
    ends = torch.tensor([0, *(len(tokens) for tokens in documents)]).cumsum(0, dtype=torch.int32)
    context = VarlenContext(ends, model.ops)
    with torch.no_grad():
        return model.logits(
            model(torch.tensor([t for tokens in documents for t in tokens]), context.positions(), context)
        )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, norm_topk_prob=True, bos_token_id=256, eos_token_id=EOS,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if weight.ndim == 1 else 0.3 * noise)
    model.save_pretrained(folder)
    save_tiny_llm_text(folder)
    return folder, model


def test_llm_serves_experts(checkpoint):
    """Greedy tokens of a batch through the engine are those of transformers for each prompt alone."""
    folder, theirs = checkpoint
    prompts = [[5, 9, 33, 70], [12, 4], [99, 98, 97, 96, 95, 94, 93]]
    llm = LLM(str(folder), dtype="float32", device="cpu")
    try:
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        answers = llm.generate(prompts, params)
    finally:
        llm.close()
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            want = theirs.generate(
                torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0
            )
        assert list(answer.outputs[0].token_ids) == want[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"per_token": 7}, "cannot go to 7 of 6 experts"),
        ({"groups": 4}, "4 equal groups"),
        ({"score": "tanh"}, "router score 'tanh'"),
        ({"shared_gate": True}, "need a width"),
        ({"experts": 0}, "greater than 0"),
    ],
)
def test_what_cannot_be(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        MoEConfig(**{"experts": 6, "per_token": 2, "expert_dim": 16} | settings)


def test_missing_expert_is_named(checkpoint, tmp_path):
    from safetensors.torch import load_file, save_file

    folder, _ = checkpoint
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.2\.up_proj\.weight"):
        load_model(resolve(str(tmp_path)), dtype="float32")


def test_int4_experts_are_the_rounded_ones(checkpoint):
    """``quantization="int4"`` rounds experts as it rounds other matrices, and leaves the router alone."""
    source = resolve(str(checkpoint[0]))
    plain, rounded = (load_model(source, dtype="float32", quantization=q) for q in (None, "int4"))
    layer, other = plain.layers[0].mlp, rounded.layers[0].mlp
    assert torch.equal(layer.router.weight, other.router.weight)
    change = (layer.experts_up.dense() - other.experts_up.dense()).abs().max()
    assert 0 < change < 0.5 * layer.experts_up.dense().abs().max()


@pytest.mark.parametrize("each", [32, 24, 17])
def test_packed_experts_are_products_by_their_values(each):
    """A stack of experts in the layout of the C++ kernels gives what its values give, to the bit in any batch, also
    where an expert begins within a group of rows."""
    library = cpu_library.load(1)
    weight = torch.randn(4 * each, 48, generator=torch.Generator().manual_seed(1))
    packed = Packed(4 * each, 48, True, library=library).requires_grad_(False)
    packed.bias.copy_(torch.arange(4.0 * each))
    packed.load(weight, None)
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(2))
    starts = torch.tensor([0, 2, 2, 4, 5], dtype=torch.int32)
    experts = [0, 0, 2, 2, 3]
    parts, biases = weight.unflatten(0, (4, each)), packed.bias.view(4, each)
    want = torch.stack([parts[e] @ row + biases[e] for e, row in zip(experts, x, strict=True)])
    got = packed.grouped(x, starts)
    torch.testing.assert_close(got, want)
    for at, e in enumerate(experts):
        alone = packed.grouped(x[at : at + 1], (torch.arange(5) > e).int())
        assert torch.equal(alone[0], got[at])


def test_sigmoids_of_routers_are_the_same_in_any_batch():
    """Gates of shared experts and tokens' scores keep their bits at a tensor's end, where torch's sigmoid does not."""
    router = SharedRouter(64, resolve_ops("cpu", batch_invariant=True))
    x = torch.randn(400, 64, generator=torch.Generator().manual_seed(1))
    logits = torch.randn(400, 6, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        router.weight.copy_(torch.randn(1, 64, generator=torch.Generator().manual_seed(3)))
        whole, (weights, _) = router(x), gating.reference(logits, None, 2, score="sigmoid")
        for tokens in range(1, 200, 3):
            assert torch.equal(router(x[:tokens]), whole[:tokens])
            assert torch.equal(gating.reference(logits[:tokens], None, 2, score="sigmoid")[0], weights[:tokens])
    torch.testing.assert_close(whole, (x @ router.weight.T).sigmoid().detach())


def test_shards_of_experts_are_experts():
    """Rank 1 of 3 of a stack has the experts 2 and 3 of 6, whole."""
    weight = drawn().layers[0].mlp.experts_up
    part = weight.shard("out", 1, 3)
    assert torch.equal(part.dense(), weight.dense().view(6, 16, 32)[2:4].flatten(0, 1))


def test_a_token_is_the_same_alone_and_in_a_batch():
    model = drawn(ops=resolve_ops("cpu", batch_invariant=True))
    tokens = list(range(2, 40))
    assert torch.equal(logits(model, tokens[:5], tokens[5:])[:5], logits(model, tokens[:5]))


def test_fused_stack_runs_experts():
    """Through the paged cache the fused layers give what the layers give one by one."""
    model = drawn()

    def run():
        k, v = model.new_kv_cache(4, 16, torch.float32)
        table, starts = torch.tensor([[2, 1]], dtype=torch.int32), torch.tensor([0, 20], dtype=torch.int32)
        context = PagedContext(k, v, table, starts, torch.tensor([20], dtype=torch.int32), model.ops)
        with torch.no_grad():
            return model(torch.arange(20), context.positions(), context)

    plain = run()
    model.stack = FusedStack(model, max_positions=64)
    torch.testing.assert_close(run(), plain, rtol=1e-4, atol=1e-4)


def test_cost_counts_the_experts_that_are_touched():
    """One token reads k experts, many tokens all of them; arithmetic grows with the tokens alone."""
    one = expert_cost(1, 2, 6, [16], 32, bits=16, activation=16)
    most = expert_cost(1000, 2, 6, [16], 32, bits=16, activation=16)
    matrix = 16 * 32 * 2
    assert one.bytes_read == pytest.approx(2 * matrix + 32 * 2)
    assert most.bytes_read == pytest.approx(6 * matrix + 1000 * 32 * 2)
    assert most.flops == 1000 * one.flops
    assert expert_cost(8, 2, 6, [16], 32, bits=16, activation=16, distinct=3).bytes_read == 3 * matrix + 8 * 64
    single, many = (least_products(CONFIG, n, 1, Storage())["linear"] for n in (1, 512))
    assert single.bytes_read < many.bytes_read


def test_parameters_are_counted():
    assert sum(p.numel() for p in drawn().parameters()) == parameter_count(CONFIG)
    assert set(weight_shapes(CONFIG)) == set(drawn().state_dict())
