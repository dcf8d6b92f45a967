"""The base of every optimizer: named parameters, their state by name, and one step over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...ops.optim.rounding import WEIGHT, Draws, round_into
from ...parallel.gradient_sums import collect, collected
from ..config import OptimizerConfig

if TYPE_CHECKING:
    from ...parallel.sharded_unit import Sink


class Optimizer:
    """Update parameters in place, each by its gradient.

    ``state[name][kind]`` is a tensor. From the state, the number of steps and the parameters, a run resumes to the bit.
    A parameter without a gradient is left alone. With ``master_weights`` the update is made on a float32 copy, kept in
    ``state[name]["master"]``, and the parameter is that copy rounded. Values kept in bfloat16 are computed in float32
    and rounded once, at the end of the step, by ``config.rounding``; ``seed`` determines stochastic rounding.

    Where a process updates only some of a run's parameters, or parts of them as vectors, ``shapes`` has those of all
    the run's parameters, whole; there may then be no parameters here.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        parameters: Mapping[str, nn.Parameter],
        *,
        master_weights: bool = False,
        seed: int = 0,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        if not parameters and shapes is None:
            raise ValueError("there is nothing to train: every parameter is frozen")
        self.config = config
        self.parameters = dict(parameters)
        shapes = {name: parameter.shape for name, parameter in parameters.items()} if shapes is None else shapes
        self.numbers = {name: number for number, name in enumerate(shapes)}
        self._matrices = {name for name, shape in shapes.items() if len(shape) >= 2}
        self.master_weights = master_weights
        self.seed = seed
        self.steps = 0
        self._sums: dict[str, Tensor] = {}
        self.state: dict[str, dict[str, Tensor]] = {}
        self.make_states()

    def make_states(self) -> None:
        """Initialize ``state``."""
        for name, parameter in self.parameters.items():
            state = self.new_state(name, parameter)
            if self.master_weights and parameter.dtype != torch.float32:
                state["master"] = parameter.detach().float()
            self.state[name] = state

    def new_state(self, name: str, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the initial state of one parameter."""
        raise NotImplementedError

    def update(self, name: str, weight: Tensor, gradient: Tensor, factor: float, scale: Tensor | None) -> None:
        """Change ``weight`` (the parameter, or its master copy) in place.

        Args:
            gradient: float32, or in the parameter's dtype.
            factor: scales the learning rate.
            scale: see ``step``.
        """
        raise NotImplementedError

    def keep(self, name: str, kept: Tensor, wide: Tensor, first: int = 0, shift: int = WEIGHT) -> None:
        """Write ``wide``, float32, to ``kept``, a part of the state or the parameter called ``name``, in its dtype.

        Args:
            first: the number of its first element within the parameter.
            shift: which random bits; see ``ops/optim/rounding.py``.
        """
        if kept.dtype == torch.bfloat16 and self.config.rounding == "stochastic":
            round_into(kept, wide, Draws(self.seed, self.steps, self.numbers[name]), first, shift)
        else:
            kept.copy_(wide)

    def gather(self) -> None:
        """Collect the gradients of a micro-batch that is not the last. Those in 16 bits are accumulated in float32."""
        collect(self.parameters, self._sums)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradient of each parameter that has one."""
        return collected(self.parameters, self._sums)

    @property
    def skips(self) -> bool:
        """True if ``step`` changes no parameter and no state when ``scale`` is not a number."""
        return False

    @torch.no_grad()
    def step(self, factor: float = 1.0, scale: Tensor | None = None) -> None:
        """Take one step for every parameter that has a gradient.

        Args:
            factor: scales the learning rate.
            scale: a float32 scalar that every gradient is multiplied by, from ``clip_scale``.
        """
        self.steps += 1
        self.update_all(self.gradients(), factor, scale)

    def update_all(self, gradients: Mapping[str, Tensor], factor: float, scale: Tensor | None) -> None:
        """Update the parameters that have a gradient, one after another."""
        for name, gradient in gradients.items():
            parameter = self.parameters[name]
            master = self.state[name].get("master")
            if master is None:
                self.update(name, parameter, gradient, factor, scale)
            else:
                self.update(name, master, gradient, factor, scale)
                parameter.copy_(master)

    @property
    def sink(self) -> Sink | None:
        """Receiver that accumulates gradients elsewhere as they are made; None if there is no such receiver."""
        return None

    def sunk_square(self, counts: Callable[[str], bool]) -> Tensor:
        """Sum the squares of the gradients in ``sink``, over the parameters that count; a float32 scalar."""
        raise NotImplementedError

    def give(self, gradients: Mapping[str, Tensor]) -> None:
        """Use these gradients for the next step, in place of those of the parameters."""
        self._sums = dict(gradients)

    def zero_grad(self) -> None:
        """Drop the gradients and free their memory."""
        self._sums = {}
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """Compute the 2-norm of all gradients together, a float32 scalar; NaN or infinite if one of them is."""
        gradients = list(self.gradients().values())
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32) if gradients else [torch.zeros(())]
        return torch.stack(norms).norm()

    @staticmethod
    def widened(gradient: Tensor, scale: Tensor | None) -> Tensor:
        """Return the gradient times ``scale`` in float32, without rounding; in place if it is float32."""
        wide = gradient.float()
        return wide if scale is None else wide.mul_(scale)

    @staticmethod
    def clip_scale(norm: Tensor, most: float) -> Tensor:
        """Return the factor that limits gradients of this global norm to ``most``; no synchronisation."""
        return (most / (norm + 1e-6)).clamp(max=1.0)

    def is_matrix(self, name: str) -> bool:
        """Return True if a parameter has two dimensions or more."""
        return name in self._matrices

    def decay(self, name: str) -> float:
        """Return the weight decay of a parameter: 0 for all but matrices."""
        return self.config.weight_decay if self.is_matrix(name) else 0.0

    def settle(self) -> None:
        """Finish a step that is still in progress."""

    def state_bytes(self) -> int:
        """Return the memory of the state."""
        return sum(tensor.nbytes for state in self.state.values() for tensor in state.values())

    def state_tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the state as ``name/kind``."""
        return {f"{name}/{kind}": tensor for name, state in self.state.items() for kind, tensor in state.items()}

    def lent(self, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
        """Lend the ``state_tensors`` of the ``wanted`` parameters, on the CPU. No step changes them before ``taken`` is
        called; here they are copies."""
        own = self.state_tensors()
        return {name: own[name].detach().to("cpu", copy=True) for name in own if wanted(name.rpartition("/")[0])}

    def taken(self) -> None:
        """Give back the tensors of ``lent``. Any thread may call this."""

    def load_state_tensors(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Restore the tensors that ``state_tensors`` returned.

        Raises:
            ValueError: other names, shapes or dtypes than this run's.
        """
        own = self.state_tensors()
        self.check_state(own, tensors)
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        self.steps = steps

    @staticmethod
    def check_state(own: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
        """Check that a checkpoint's state has the names, shapes and dtypes of this run's. Raises ValueError."""
        if set(own) != set(found):
            odd = sorted(set(own) ^ set(found))[0]
            raise ValueError(f"the checkpoint's optimizer state is of another run ({odd} is on one side only)")
        for name, tensor in own.items():
            other = found[name]
            if other.shape != tensor.shape or other.dtype != tensor.dtype:
                raise ValueError(
                    f"the checkpoint's optimizer state {name} is {other.dtype} {list(other.shape)}, this run's "
                    f"{tensor.dtype} {list(tensor.shape)}"
                )
