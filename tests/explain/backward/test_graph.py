"""What ``explain`` says of a backward pass is what can be derived by hand."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from transect.explain.backward.graph import Backward, ForwardRecord, explain
from transect.explain.backward.text import lines


class TwoLayers(nn.Module):
    """``tanh(x W1) W2``, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5, bias=False)
        self.second = nn.Linear(5, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


def explained() -> tuple[Backward, TwoLayers]:
    torch.manual_seed(0)
    model = TwoLayers()
    with ForwardRecord() as record:
        loss = (model(torch.randn(4, 3)) - torch.randn(4, 2)).square().mean()
    return explain(loss, record), model


def test_nodes_come_in_the_order_that_the_chain_rule_gives() -> None:
    found, _ = explained()
    # A leaf's node runs as soon as it can; of the rest the one that was made last.
    assert [(node.name, node.weight or node.module) for node in found.nodes] == [
        ("MeanBackward0", ""),
        ("PowBackward0", ""),
        ("SubBackward0", ""),
        ("MmBackward0", "second"),
        ("TBackward0", "second"),
        ("AccumulateGrad", "second.weight"),
        ("TanhBackward0", ""),
        ("MmBackward0", "first"),
        ("TBackward0", "first"),
        ("AccumulateGrad", "first.weight"),
    ]
    assert [node.feeds for node in found.nodes] == [(1,), (2,), (3,), (6, 4), (5,), (), (7,), (8,), (9,), ()]


def test_saved_bytes_are_those_of_the_hand_count() -> None:
    found, _ = explained()
    numbers = {index: node.bytes("activation") // 4 for index, node in enumerate(found.nodes)}
    # y - target for the square; tanh's result for the product and, the same memory, for tanh; x for the first product
    assert {index: count for index, count in numbers.items() if count} == {1: 4 * 2, 3: 4 * 5, 7: 4 * 3}
    assert found.activation_bytes == found.peak == 4 * (8 + 20 + 12)
    tanh = found.nodes[6].saved
    assert [(saved.shape, saved.counted, saved.kind) for saved in tanh] == [((4, 5), False, "activation")]
    weights = [(saved.shape, saved.weight) for node in found.nodes for saved in node.saved if saved.kind == "weight"]
    assert weights == [((5, 2), "second.weight")]  # x needs no gradient, so W1 is not asked for
    assert found.weight_bytes == 4 * 10


def test_the_graph_lets_go_of_what_no_later_node_needs() -> None:
    found, _ = explained()
    assert [node.held // 4 for node in found.nodes] == [40, 40, 32, 32, 32, 32, 32, 12, 0, 0]


def test_every_node_is_timed_and_their_sum_fits_into_the_whole() -> None:
    found, _ = explained()
    assert all(node.seconds > 0 for node in found.nodes)
    assert sum(node.seconds for node in found.nodes) <= found.seconds


def test_gradients_are_those_of_a_plain_backward_pass() -> None:
    _, model = explained()
    torch.manual_seed(0)
    other = TwoLayers()
    (other(torch.randn(4, 3)) - torch.randn(4, 2)).square().mean().backward()
    for ours, plain in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.grad, plain.grad)


def test_a_view_counts_as_the_memory_that_it_keeps_alive() -> None:
    x = torch.randn(100, 3)
    w = torch.randn(3, requires_grad=True)
    found = explain((x[:2] * w).sum())
    assert found.activation_bytes == x.nbytes
    assert [saved.shape for node in found.nodes for saved in node.saved if saved.kind == "activation"] == [(2, 3)]


def test_a_frozen_weight_is_a_weight_and_an_expanded_one_counts_once() -> None:
    frozen = nn.Parameter(torch.randn(3, 3), requires_grad=False)
    x = torch.randn(2, 3, requires_grad=True)
    found = explain(((x @ frozen) @ frozen.mT.expand(3, 3)).sum())
    assert found.activation_bytes == 0
    assert found.weight_bytes == frozen.nbytes


def test_a_node_that_two_paths_lead_to_runs_once_and_after_both() -> None:
    x = torch.randn(3, requires_grad=True)
    shared = x.exp()
    found = explain((shared.sin() * shared).sum())
    assert [node.name for node in found.nodes] == [
        "SumBackward0", "MulBackward0", "SinBackward0", "ExpBackward0", "AccumulateGrad",
    ]  # fmt: skip
    assert found.nodes[1].feeds == (2, 3)


def test_recomputed_activations_are_named_as_hidden_and_not_computed_to_be_looked_at() -> None:
    calls = []

    def inside(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return x.exp().sin()

    x = torch.randn(3, requires_grad=True)
    found = explain(checkpoint(inside, x, use_reentrant=False).sum())
    assert len(calls) == 2  # forward, and once for the backward pass
    assert sum(node.hidden for node in found.nodes) == 2
    assert any("2 more were saved by hooks" in line for line in lines(found))


def test_totals_add_up() -> None:
    found, _ = explained()
    for totals in (found.totals(), found.totals(lambda node: node.module)):
        assert sum(total.nodes for total in totals) == len(found.nodes)
        assert sum(total.bytes for total in totals) == found.activation_bytes
        assert sum(total.seconds for total in totals) == pytest.approx(sum(node.seconds for node in found.nodes))
    assert [total.nodes for total in found.totals() if total.name == "MmBackward0"] == [2]


def test_layers_that_are_alike_are_one_line_each_unless_every_node_is_wanted() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    with ForwardRecord() as record:
        loss = model(torch.randn(2, 4)).sum()
    found = explain(loss, record)
    short, long = list(lines(found)), list(lines(found, every=True))
    assert [line.split()[:6] for line in short if "nodes as in" in line] == [
        ["5-8", "4", "nodes", "as", "in", "2"],
        ["9-12", "4", "nodes", "as", "in", "2"],
    ]
    assert sum("AddmmBackward0" in line for line in short) == 2  # in the graph, and in the totals
    assert sum("AddmmBackward0" in line for line in long) == 4


def test_hooks_are_gone_afterwards() -> None:
    explained()
    assert not nn.modules.module._global_forward_pre_hooks
    assert not nn.modules.module._global_forward_hooks


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (torch.ones(2, requires_grad=True) * 2, "single number"),
        (torch.ones(()), "depends on no tensor"),
        (1.5, "must be a tensor, not float"),
    ],
)
def test_what_has_no_backward_pass_is_refused(loss: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explain(loss)
