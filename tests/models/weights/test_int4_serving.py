"""``ServingInt4``: gate and up with their rows in turn are the same matrices."""

import torch

from transect.models.staging import Staging
from transect.models.weights.int4_serving import Int4Products, ServingInt4
from transect.ops.activation import swiglu


def _weight(outputs: int, inputs: int, seed: int, bias: bool = False) -> ServingInt4:
    made = ServingInt4(outputs, inputs, bias, products=Int4Products.on("cpu"), dtype=torch.float32)
    numbers = torch.Generator().manual_seed(seed)
    made.load(torch.randn(outputs, inputs, generator=numbers), Staging(torch.device("cpu")))
    if made.bias is not None:
        made.bias.data.normal_(generator=numbers)
    return made


def test_gate_and_up_in_turns_are_the_same_matrices() -> None:
    gate, up = _weight(48, 256, 0), _weight(48, 256, 1)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(2))
    before = gate.dense(), up.dense()
    joined = gate.join_with([up], gated=True)
    assert joined is not None and joined.in_turns
    assert gate.arranged.data_ptr() == joined.arranged.data_ptr() and up.arranged.shape == gate.arranged.shape
    assert torch.equal(gate.dense(), before[0]) and torch.equal(up.dense(), before[1])
    assert torch.equal(joined.dense(), torch.cat(before))
    torch.testing.assert_close(
        joined.product()(x), torch.cat([gate(x), up(x)], -1), rtol=1e-5, atol=3e-5
    )  # sums of 256
    gated = joined.gated_product()
    assert gated is not None
    torch.testing.assert_close(gated(x), swiglu.by_exp(gate(x), up(x)), rtol=1e-4, atol=1e-3)


def test_what_is_not_gated_lies_one_below_the_other() -> None:
    q, k = _weight(48, 200, 0, True), _weight(16, 200, 1, True)
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(2))
    joined = q.join_with([k])
    assert joined is not None and not joined.in_turns and joined.gated_product() is None
    torch.testing.assert_close(joined.product()(x), torch.cat([q(x), k(x)], -1))


def test_parts_with_a_bias_or_of_two_sizes_are_not_in_turns() -> None:
    for parts in ((_weight(16, 128, 0, True), _weight(16, 128, 1, True)), (_weight(32, 128, 0), _weight(16, 128, 1))):
        joined = parts[0].join_with(parts[1:], gated=True)
        assert joined is not None and not joined.in_turns
