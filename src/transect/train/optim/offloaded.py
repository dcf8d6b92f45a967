"""Run AdamW on the CPU with states in host memory or on a disk (ZeRO-Offload, -Infinity).

    device   forward, backward ── gradients ─┐                       ┌── new weights ── forward ...
    host                                     └─ taken in │ norm │ AdamW, group by group
    disk                                                  read ahead ┴ written behind

The device keeps weights to compute with; float32 weights and both moments, 12 bytes for each number, are the host's.
Gradients are copied during the backward pass and freed on the device; new weights are sent back while the next ones
are computed. Since the norm of all gradients scales each of them, the CPU begins after the last gradient has arrived.

``delay`` hides its step behind the device's next one: step t + 1 computes its gradients at the weights that step t - 1
made. That is another method, which converges a little differently; it is off unless asked for.

Ren et al. 2021, arXiv:2101.06840; Rajbhandari et al. 2021, arXiv:2104.07857.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...hardware.host_memory import host_tensor
from ...ops.cpu.adamw import HostStep, corrections, host_kernels
from ...parallel.offload.drain import Drain
from ...parallel.offload.groups import GROUP
from ...parallel.offload.pieces import FileUpload
from ...parallel.offload.states import DiskStates, HostStates, States
from ...parallel.offload.upload import Upload
from ...parallel.sharded_unit import Sink
from ..config import OptimizerConfig
from .base import Optimizer

WEIGHT, FIRST, SECOND = 0, 1, 2
DRAINS = 6
"""Cores for each core that receives gradients (4 bytes a number) with ``delay``; the others compute the step (28
bytes)."""
KINDS = {"m": FIRST, "v": SECOND, "master": WEIGHT}


@dataclass(frozen=True, slots=True)
class Offload:
    """Offloading of optimizer states.

    Attributes:
        folder: folder on a disk; empty for host memory.
        delay: take a step while the device computes the next one.
        watch: take each parameter's gradient as soon as the backward pass has made it. False where gradients are given
            (``Optimizer.give``), as they are where ranks sum them.
        wide: a step's gradients are sums, and kept in float32.
        threads: CPU threads for this process; 0 for all.
        most: numbers that are moved together.
        upload: stores new weights; None to write them into the parameters.
    """

    folder: str = ""
    delay: bool = False
    watch: bool = True
    wide: bool = False
    threads: int = 0
    most: int = GROUP
    upload: FileUpload | None = None


class OffloadedAdamW(Optimizer):
    """AdamW over parameters whose states are elsewhere; states and checkpoints are those of ``AdamW`` in float32.

    Raises:
        ValueError: states in 16 bits are asked for, or there is no room for them.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        parameters: Mapping[str, nn.Parameter],
        offload: Offload,
        *,
        master_weights: bool = False,
        seed: int = 0,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        odd = [name for name, p in parameters.items() if p.dtype != torch.float32 and not master_weights]
        if odd:
            raise ValueError(
                f'offloaded states are float32, and {odd[0]} has none: set precision to "mixed" (or "float32")'
            )
        self.offload = offload
        super().__init__(config, parameters, master_weights=master_weights, seed=seed, shapes=shapes)

    def make_states(self) -> None:
        """Initialize the states: zeros, and the weights as they are."""
        offload, parameters = self.offload, self.parameters
        sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
        threads = offload.threads or len(os.sched_getaffinity(0))
        # Steps beside the next pass share the cores with what takes its gradients in: two teams that have all of them
        # would wait at every barrier for a thread without a core.
        drains = max(1, threads // DRAINS) if offload.delay else threads
        self.kernels = host_kernels(max(1, threads - drains) if offload.delay else threads)
        self.states: States
        if offload.folder:
            self.states = DiskStates(offload.folder, sizes, len(KINDS), offload.most)
        else:
            self.states = HostStates(sizes, len(KINDS), offload.most)
        self._upload = offload.upload or Upload(parameters, device, offload.most)
        for name in parameters:
            self.states.write(WEIGHT, name, self._upload.read(name))
        self._drain = self._new_drain(drains)
        self._other = self._new_drain(drains) if offload.delay else None
        self._made: dict[str, Tensor] = {}
        """New weights of a delayed step (``delay``) that have not reached the parameters."""
        if offload.delay:
            gpu = device.type == "cuda"
            self._made = {n: host_tensor((p.numel(),), p.dtype, pin=gpu) for n, p in parameters.items()}
        self._team = ThreadPoolExecutor(1, thread_name_prefix="optimizer") if offload.delay else None
        self._step: Future[None] | None = None
        self._free = threading.Event()
        """Set while no reader uses the states."""
        self._free.set()
        self._stale: set[str] = set()
        """Names of parameters whose new weights, from a delayed step, have not reached them."""
        if offload.watch:
            for name, parameter in parameters.items():
                parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._arrived(name, p))  # type: ignore[misc]

    def _new_drain(self, threads: int) -> Drain:
        sizes = {name: parameter.numel() for name, parameter in self.parameters.items()}
        narrow = {parameter.dtype for parameter in self.parameters.values()} - {torch.float32}
        dtype = torch.float32 if self.offload.wide or not narrow else narrow.pop()
        parts = host_tensor((sum(sizes.values()),), dtype).split(list(sizes.values()))
        return Drain(dict(zip(sizes, parts, strict=True)), host_kernels(threads))

    # Gradients

    def _arrived(self, name: str, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self._drain.take(name, parameter.grad)
        parameter.grad = None

    def gather(self) -> None:
        """Accumulate gradients like ``Optimizer``; does nothing if hooks take gradients during the backward pass."""
        if not self.offload.watch:
            super().gather()

    @property
    def sink(self) -> Sink | None:
        """Receiver of gradients; see ``Optimizer``."""
        return self._drain.take

    def give(self, gradients: Mapping[str, Tensor]) -> None:
        """Take the gradients as ``Optimizer`` does; they are sent to the host, and the caller may drop them."""
        self._drain.clear()
        for name, gradient in gradients.items():
            self._drain.take(name, gradient)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradient of each parameter that has one: in host memory, or on the device before they are
        given."""
        self._drain.wait()
        given = self._drain.given
        if not given:
            return super().gradients()
        return {name: self._drain.into[name].view_as(p) for name, p in self.parameters.items() if name in given}

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """Compute the norm as ``Optimizer`` does, on the CPU."""
        return torch.tensor(math.sqrt(square) if (square := self._drain.squares()) >= 0 else math.nan)

    def sunk_square(self, counts: Callable[[str], bool]) -> Tensor:
        """Sum the squares as ``Optimizer`` does, on the CPU."""
        return torch.tensor(self._drain.squares(counts))

    def zero_grad(self) -> None:
        """Drop the gradients; see ``Optimizer``."""
        self._drain.clear()
        super().zero_grad()

    # A step

    def update_all(self, gradients: Mapping[str, Tensor], factor: float, scale: Tensor | None) -> None:
        """Take a step on the CPU; with ``delay`` start it, and apply the previous one to the parameters."""
        config = self.config
        step = HostStep(
            config.learning_rate * factor,
            config.beta1,
            config.beta2,
            config.eps,
            *corrections(config.beta1, config.beta2, self.steps),
            1.0 if scale is None else float(scale),
        )
        if self._team is None:
            with self._upload.begun():
                self._walk(dict(gradients), step)
            return
        assert self._other is not None
        self.settle()
        self._drain, self._other = self._other, self._drain
        self._step = self._team.submit(self._walk, dict(gradients), step)
        self._stale = set(gradients)

    @torch.no_grad()
    def _walk(self, gradients: Mapping[str, Tensor], step: HostStep) -> None:
        self._free.wait()
        flat = {name: gradient.view(-1) for name, gradient in gradients.items()}
        wanted = [n for n, group in enumerate(self.states.groups) if any(p.name in flat for p in group.pieces)]
        for group, states in self.states.walk(wanted):
            for piece in group.pieces:
                if piece.name not in flat:
                    continue
                weight, m, v = (states[kind][piece.place] for kind in (WEIGHT, FIRST, SECOND))
                gradient, decay = flat[piece.name][piece.begin : piece.end], self.decay(piece.name)
                made = self._made.get(piece.name)
                later = None if made is None else nullcontext(made[piece.begin : piece.end])
                with later or self._upload.piece(piece) as out:
                    self.kernels.step(gradient, weight, m, v, out, step, decay)

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for a delayed step, and apply it to the parameters."""
        if self._step is not None:
            self._step.result()
            self._step = None
        if self._stale:
            with self._upload.begun():
                for name in self._stale:
                    self._upload.whole(name, self._made[name])
            self._upload.wait()
            self._stale = set()

    # States in and out

    def _kinds(self, name: str) -> dict[str, int]:
        """Return the kinds of states that a checkpoint keeps: float32 parameters are in it already."""
        return {k: n for k, n in KINDS.items() if n != WEIGHT or self.parameters[name].dtype != torch.float32}

    def state_bytes(self) -> int:
        """Return the memory, or disk space, of the states."""
        return self.states.nbytes

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the state's tensors; see ``Optimizer``. States on a disk are read into memory."""
        self.settle()
        return {
            f"{name}/{kind}": self.states.read(number, name).view_as(parameter)
            for name, parameter in self.parameters.items()
            for kind, number in self._kinds(name).items()
        }

    def lent(self, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
        """Lend the state's tensors; see ``Optimizer``. States in host memory are not copied: the next step waits for
        ``taken``."""
        tensors = {name: t for name, t in self.state_tensors().items() if wanted(name.rpartition("/")[0])}
        if not self.offload.folder:
            self._free.clear()
        return tensors

    def taken(self) -> None:
        """Give the tensors back; see ``Optimizer``."""
        self._free.set()

    def load_state_tensors(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Restore states, see ``Optimizer``; offloaded and other runs can resume from each other's states."""
        self.settle()
        kinds = {f"{name}/{kind}": (name, n) for name in self.parameters for kind, n in self._kinds(name).items()}
        own = {key: torch.empty(self.parameters[name].shape, device="meta") for key, (name, _) in kinds.items()}
        self.check_state(own, tensors)
        for key, (name, number) in kinds.items():
            self.states.write(number, name, tensors[key].reshape(-1))
        self.steps = steps
