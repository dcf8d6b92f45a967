"""Every implementation of an operator against float64, in both directions, from its registry entry alone.

The yardstick is torch: ``error / allowed`` where ``allowed`` is ``Op.error_ratio`` (2) times the larger of two
errors: the one that torch's own operator (the peer called ``torch``, else the reference) makes in the same dtype on
the same inputs, and the one made by rounding the float64 answer to that dtype. An error is ``|out - exact| /
|exact|`` in the 2-norm. Results of few elements (sums) are drawn many times, and their errors pooled: a single one
may be right by luck. Whole numbers are right or wrong, and drawn once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..registry import Implementation, Op

FEW = 64
DRAWS = 16
LAYOUTS = ("contiguous", "apart", "padded")
_SPECIAL = "NaN or infinities are not in the same places as in float64"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One output or gradient of one implementation on one example."""

    op: str
    implementation: str
    dtype: str
    example: int
    layout: str
    quantity: str
    error: float
    torch_error: float
    allowed: float
    same_special: bool
    """True if NaN and infinities are at the same elements as in float64 (or in torch's result)."""

    @property
    def passed(self) -> bool:
        return self.same_special and self.error <= self.allowed

    @property
    def ratio(self) -> float:
        """Error as a multiple of torch's."""
        return self.error / self.torch_error if self.torch_error else (0.0 if self.error == 0 else float("inf"))


def check(
    op: Op,
    implementation: Implementation,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    examples: Any = None,
    layouts: Sequence[str] = LAYOUTS,
    draws: int = DRAWS,
    plain: bool = True,
) -> Iterator[Comparison]:
    """Compare on every example that the implementation takes in this dtype; the first two in all ``layouts`` (elements
    apart, rows padded), the others in the first. Results of few elements are drawn ``draws`` times. Without ``plain``
    an implementation that has gradients is compared only with them.

    Raises:
        Unavailable: the implementation cannot run here.
    """
    own = implementation.load()
    forms: list[tuple[str, Callable[..., Any], bool]] = []
    if plain or implementation.autograd is None:
        forms.append(("", own, False))
    if implementation.autograd is not None:
        forms.append(("operator ", implementation.autograd(), True))
    for index, example in enumerate(op.examples() if examples is None else examples):
        for layout in layouts if index < 2 else layouts[:1]:
            if implementation.refusal and implementation.refusal(**_first(op, example, dtype, device, layout)):
                continue
            for prefix, call, with_gradient in forms:
                if prefix and layout == "padded":
                    continue
                for quantity, measured in _compare(
                    op, call, example, dtype, device, layout, with_gradient, draws
                ).items():
                    name = str(dtype).removeprefix("torch.")
                    yield Comparison(
                        op.name,
                        implementation.backend,
                        name,
                        index,
                        layout,
                        prefix + quantity,
                        *measured.verdict(op, dtype),
                    )


def _first(op: Op, example: Mapping[str, Any], dtype: torch.dtype, device: str, layout: str) -> dict[str, Any]:
    """Prepare the arguments of an implementation at an example's first draw."""
    inputs = {key: prepared(op, key, value, dtype, device, 0) for key, value in example.items()}
    return {key: _lay_out(v, layout) if key not in op.mutates else v for key, v in inputs.items()}


@dataclass(slots=True)
class _Pool:
    """Squared errors added over draws."""

    exact: float = 0.0
    ours: float = 0.0
    theirs: float = 0.0
    rounded: float = 0.0
    elements: int = 0
    whole: bool = False
    same_special: bool = True

    @property
    def settled(self) -> bool:
        """True if further draws would add no information."""
        return self.elements >= FEW or self.elements == 0 or self.whole

    def add(self, exact: Tensor, ours: Tensor, theirs: Tensor) -> None:
        rounded = exact.to(ours.dtype)
        wide, other = ours.double(), theirs.double()
        nothing = torch.zeros_like(exact)
        normal = rounded.isfinite()
        same = torch.equal(wide.isnan(), exact.isnan()) and torch.equal(
            wide.where(~normal & ~wide.isnan(), nothing), rounded.double().where(~normal & ~exact.isnan(), nothing)
        )
        self.same_special &= same and not bool((wide.isinf() & normal).any())
        usable = normal & wide.isfinite() & other.isfinite()
        self.exact += float(exact.where(usable, nothing).square().sum())
        self.ours += float((wide - exact).where(usable, nothing).square().sum())
        self.theirs += float((other - exact).where(usable, nothing).square().sum())
        self.rounded += float((rounded.double() - exact).where(usable, nothing).square().sum())
        self.elements = max(self.elements, exact.numel())
        self.whole = not ours.is_floating_point()

    def verdict(self, op: Op, dtype: torch.dtype) -> tuple[float, float, float, bool]:
        scale = self.exact**0.5 or 1.0
        unit = torch.finfo(dtype).eps / 2 if self.elements < FEW else 0.0
        if not self.exact:  # the answer is 0 (a softmax over one key): nothing to be relative to
            unit = 8 * torch.finfo(dtype).eps
        theirs = self.theirs**0.5 / scale
        allowed = op.error_ratio * max(theirs, self.rounded**0.5 / scale, unit)
        return self.ours**0.5 / scale, theirs, allowed, self.same_special


def _compare(
    op: Op,
    call: Callable[..., Any],
    example: Mapping[str, Any],
    dtype: torch.dtype,
    device: str,
    layout: str,
    with_gradient: bool,
    draws: int,
) -> dict[str, _Pool]:
    pools: dict[str, _Pool] = {}
    peer = op.peers.get("torch", op.reference)
    for draw in range(draws):
        if draw:  # without gradients, once no gradient needs another draw
            with_gradient = any(not pool.settled for name, pool in pools.items() if name.startswith("gradient"))
        inputs = {key: prepared(op, key, value, dtype, device, draw) for key, value in example.items()}
        exact_inputs = {key: v.double() if _floating(v) else v for key, v in inputs.items()}
        laid = {key: _lay_out(v, layout) if key not in op.mutates else v for key, v in inputs.items()}
        exact, weights = _run(op, op.reference, exact_inputs, with_gradient, draw, dtype, None)
        ours, _ = _run(op, call, laid, with_gradient, draw, dtype, weights)
        theirs, _ = _run(op, peer, inputs, with_gradient, draw, dtype, weights)
        for quantity, value in exact.items():
            pools.setdefault(quantity, _Pool()).add(value, ours[quantity], theirs[quantity])
        if all(pool.settled for pool in pools.values()):
            break
    return pools


def _run(
    op: Op,
    call: Callable[..., Any],
    inputs: Mapping[str, Any],
    with_gradient: bool,
    draw: int,
    dtype: torch.dtype,
    weights: Any,
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Compute the outputs and, if asked, gradients for random upstream gradients (drawn here, or ``weights`` of an
    earlier run)."""
    arguments = {key: _fresh(op, key, value, with_gradient) for key, value in inputs.items()}
    result = call(**arguments)
    outputs = [*_listed(result), *(arguments[key] for key in op.mutates)]
    found = {f"output {i}": value.detach() for i, value in enumerate(outputs)}
    if weights is None:  # rounded to the dtype under test, so that float64 sees the same upstream gradient
        weights = [_upstream(o, 1000 + draw + i).to(dtype) for i, o in enumerate(outputs)]
    if with_gradient and op.differentiable:
        names = [key for key in op.differentiable if _floating(arguments.get(key))]
        pairs = [(o, w.to(o.dtype)) for o, w in zip(outputs, weights, strict=True) if o.requires_grad]
        reached, upstream = [o for o, _ in pairs], [w for _, w in pairs]
        gradients = torch.autograd.grad(reached, [arguments[key] for key in names], upstream)
        found |= {f"gradient of {key}": value for key, value in zip(names, gradients, strict=True)}
    return found, weights


def _upstream(output: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(output.device).manual_seed(seed)
    return torch.randn(output.shape, generator=generator, device=output.device)


def at_example(
    op: Op, implementation: Implementation, inputs: Mapping[str, Any], direction: str
) -> tuple[float, float, float]:
    """Return (error, torch's error, allowed) of an implementation on a small example: the worst output, or gradient.

    Raises:
        ValueError: NaN or an infinity where float64 has none, or vice versa.
    """
    found = list(check(op, implementation, torch.float32, examples=[inputs], layouts=LAYOUTS[:1]))
    wanted = [each for each in found if ("gradient" in each.quantity) == (direction != "forward")]
    if not all(each.same_special for each in wanted):
        raise ValueError(_SPECIAL)
    worst = max(wanted, key=lambda each: each.error / each.allowed if each.allowed else each.error)
    return worst.error, worst.torch_error, worst.allowed


def at_case(
    op: Op, call: Callable[..., Any], inputs: Mapping[str, Any], direction: str
) -> tuple[float | None, float | None, float | None]:
    """Return (error, torch's error, allowed) of ``call`` on a case's real shape: the worst output, or gradient.

    Against ``op.exact`` or the reference in float64; all None where the memory for that is not there.

    Raises:
        ValueError: NaN or an infinity where float64 has none, or vice versa.
    """
    dtypes = [value.dtype for key, value in inputs.items() if _floating(value) and key not in op.keeps_dtype]
    dtype = dtypes[0] if dtypes else torch.float32
    with_gradient = direction != "forward"
    wide = {key: value.double() if _floating(value) else value for key, value in inputs.items()}
    try:
        exact, weights = _run(op, op.exact or op.reference, wide, with_gradient, 0, dtype, None)
        del wide
        ours, _ = _run(op, call, inputs, with_gradient, 0, dtype, weights)
        theirs, _ = _run(op, op.peers.get("torch", op.reference), inputs, with_gradient, 0, dtype, weights)
        verdicts = []
        for quantity in sorted(exact):
            if with_gradient and not quantity.startswith("gradient"):
                continue
            pool = _Pool()
            pool.add(exact.pop(quantity), ours.pop(quantity), theirs.pop(quantity))
            verdicts.append(pool.verdict(op, dtype))
    except torch.OutOfMemoryError:
        return None, None, None
    if not all(same for *_, same in verdicts):
        raise ValueError(_SPECIAL)
    return max(((e, t, a) for e, t, a, _ in verdicts), key=lambda v: v[0] / v[2] if v[2] else v[0])


def _fresh(op: Op, key: str, value: Any, with_gradient: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    if key in op.mutates:
        return value.clone()
    wanted = with_gradient and key in op.differentiable
    return value.detach().requires_grad_() if wanted else value


def _listed(result: Any) -> Sequence[Tensor]:
    if result is None:
        return []
    return [result] if isinstance(result, Tensor) else list(result)


def _floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def prepared(op: Op, key: str, value: Any, dtype: torch.dtype, device: str, draw: int) -> Any:
    """Prepare an example's value for one draw: floating-point tensors in ``dtype``, except those in
    ``op.keeps_dtype``."""
    if not isinstance(value, Tensor):
        return value.to(device) if hasattr(value, "to") else copy.copy(value)
    if not value.is_floating_point():
        return value.to(device)
    if draw and key not in op.keeps_dtype:
        value = value * (0.75 + 0.5 * torch.rand(value.shape, generator=torch.Generator().manual_seed(draw)))
    return value.to(device, torch.float32 if key in op.keeps_dtype else dtype)


def _lay_out(value: Any, layout: str) -> Any:
    """Return the same values in other strides."""
    if layout == "contiguous" or not _floating(value) or value.dim() == 0:
        return value
    *front, last = value.shape
    if layout == "apart":
        roomy = value.new_full((*front, 2 * last + 1), float("nan"))[..., 1::2]
    else:
        roomy = value.new_full((*front, last + 3), float("nan"))[..., 1 : 1 + last]
    return roomy.copy_(value)
