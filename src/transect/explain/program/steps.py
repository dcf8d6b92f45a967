"""Finds the step that a program repeats: an optimizer's step, a batch of a loader, ``generate``, or a forward call.

Hooks note the moment when each of these ends or begins. Marks that come again and again are the program's steps. Only
the thread that started the watch counts.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data import dataloader

KINDS = ("optimizer step", "generate call", "batch of a loader", "forward call")
"""Kinds of marks, the best sign of a step first."""
REPEATS = 3
"""Marks of one object that count as repeating."""
LATER = 8
"""Marks of a lesser kind needed while a module trains, or beside a loader: an optimizer or the loader may mark the
steps."""
TRAINING_S = 0.3
"""Seconds after which forward calls of a module that trains are steps, if no optimizer has made one."""
OUTNUMBERED = 500
"""Forward calls that are steps beside an optimizer, which may need many of them for each of its own."""
TOKENS = 12
"""Forward calls inside of one ``generate``, after which a step is a token."""
LOOKS = 200
"""Calls whose masks and ids are inspected."""
SEEN_ROWS = 64
"""Rows of each batch of ids that are kept for inspection."""
LEAST_PADDING, MOST_RAGGED = 0.05, 0.3
"""Least share of padding of interest, and largest that batches padded to their longest row usually have."""
SEQUENCES = ("decoder_input_ids", "input_ids", "inputs_embeds")
"""Arguments of transformers' models that hold a sequence; others get theirs as the first argument."""

Mark = tuple[str, object]
"""(kind, mark of the module or optimizer); 0 for loaders, which programs create repeatedly."""


class StepWatch:
    """Hooks that detect steps, and padding: only a mask or a ``padding_idx`` marks a token as padding.

    Args:
        seen: called with each mark; None if only padding is wanted.
    """

    def __init__(self, seen: Callable[[Mark], None] | None = None) -> None:
        self._seen = seen
        self.counts: Counter[Mark] = Counter()
        self._generating = 0
        self._made: dict[int, list[weakref.ref[Tensor]]] = {}
        """Tensors that the last call of each root returned."""
        self._calls = self._chained = 0
        self._shapes: dict[int, tuple[int, ...]] = {}
        """Shape of the sequence that each root got last."""
        self._lengths: list[int] = []
        """Lengths of sequences with one element more than the call before."""
        self._updated: set[int] = set()
        """Parameters of all optimizers."""
        self._graded: dict[int, tuple[int, int]] = {}
        """(Place, size) of each parameter that had a gradient at a step."""
        self._pending: dict[int, tuple[weakref.ref[Tensor] | None, int, int]] = {}
        """The first gradient of each optimizer, its version, and backward passes that reached it since it was used."""
        self._dropped: Counter[int] = Counter()
        """Gradients of each optimizer that were dropped before its step."""
        self._used: Counter[int] = Counter()
        """Steps of each optimizer, without its first."""
        self._optimizers: list[weakref.ref[Any]] = []
        self._training: dict[Mark, bool] = {}
        self._trained = math.inf
        """Time of the first forward call of a module that trains."""
        self._inside: set[int] = set()
        """Modules inside of a root: a module that was called by no other."""
        self._roots: dict[int, tuple[weakref.ref[nn.Module], tuple[str, int]]] = {}
        """Each root with its mark: the name of its class and a number, which a new root takes over from one of its
        class that no longer exists."""
        self._masks: list[tuple[Tensor, int]] = []
        self._ids: list[tuple[Tensor, int, int]] = []
        self._undo: list[Callable[[], object]] = []
        self._generate: type | None = None

    def start(self) -> None:
        """Install the hooks."""
        self._thread = threading.get_ident()
        # A model's own hooks would be copied and saved with it: these are of all modules.
        hooks = nn.modules.module
        self._forward = [
            hooks.register_module_forward_pre_hook(self._called),
            hooks.register_module_forward_hook(self._root, with_kwargs=True),
        ]
        self._undo.append(self.ignore_forward)
        if self._seen is None:
            return
        hook = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self._stepped(optimizer))
        self._undo.append(hook.remove)
        kind = dataloader._BaseDataLoaderIter
        plain = kind.__next__

        @functools.wraps(plain)
        def following(loader: Any) -> Any:
            self._mark(KINDS[2])
            return plain(loader)

        kind.__next__ = following  # type: ignore[method-assign,assignment]
        self._undo.append(lambda: setattr(kind, "__next__", plain))

    def ignore_forward(self) -> None:
        """Stop observing calls of modules."""
        while self._forward:
            self._forward.pop().remove()

    def stop(self) -> None:
        """Remove the hooks."""
        while self._undo:
            self._undo.pop()()

    def step(self) -> Mark | None:
        """Return the best mark that repeats; None if there is none yet."""
        for kind in KINDS:
            for mark, count in self.counts.items():
                if mark[0] == kind and count >= self._needed(mark):
                    return mark
        return None

    @property
    def padding(self) -> float:
        """Share of padding: of attention masks if there are any, else of ids with a ``padding_idx``; only that beyond
        each batch's longest row, if the rest is usual. 0 if negligible."""
        padded = [(mask == 0, count) for mask, count in self._masks]
        padded = padded or [(_padded(rows.cpu(), pad), count) for rows, pad, count in self._ids]
        tokens = sum(count for _, count in padded) or 1
        share = sum(float(each.double().mean()) * count for each, count in padded) / tokens
        columns = sum(float(each.all(0).double().mean()) * count for each, count in padded) / tokens
        share = share if share - columns > MOST_RAGGED else columns
        return share if share > LEAST_PADDING else 0.0

    def _needed(self, mark: Mark) -> int:
        if mark[0] == KINDS[2]:  # loaders prefetch
            return LATER if any(self._training.values()) else REPEATS
        if mark[0] != KINDS[3]:
            return REPEATS
        if self._generating:
            return TOKENS
        if any(kind == KINDS[0] for kind, _ in self.counts):
            return OUTNUMBERED
        if self._training.get(mark) and time.perf_counter() - self._trained < TRAINING_S:
            return OUTNUMBERED
        beside = any(kind != KINDS[3] for kind, _ in self.counts)
        return LATER if beside or self._training.get(mark) else REPEATS

    def _mark(self, kind: str, owner: object = 0) -> None:
        if threading.get_ident() == self._thread and self._seen is not None:
            self._count((kind, owner))

    def _stepped(self, optimizer: Any) -> None:
        """Mark a step of an optimizer; a new one takes the number of one that no longer exists."""
        if threading.get_ident() != self._thread:
            return
        known = self._optimizers
        number = next((i for i, each in enumerate(known) if each() is optimizer), -1)
        if number < 0:
            number = next((i for i, each in enumerate(known) if each() is None), len(known))
            known[number : number + 1] = [weakref.ref(optimizer)]
            self._updated |= {id(each) for group in optimizer.param_groups for each in group["params"]}
        if any(self.counts[KINDS[0], i] < LATER for i in range(len(known))) and self.counts[KINDS[0], number] < LOOKS:
            self._watch_gradients(number, optimizer)
        self._count((KINDS[0], number))

    def _watch_gradients(self, number: int, optimizer: Any) -> None:
        """Note the parameters with gradients, and gradients of other optimizers that are dropped before a step."""
        roots = (root for reference, _ in self._roots.values() if (root := reference()) is not None)
        for place, each in enumerate(itertools.chain.from_iterable(root.parameters() for root in roots)):
            if each.grad is not None:
                self._graded[id(each)] = place, each.numel()
        for index, reference in enumerate(self._optimizers):
            other = optimizer if index == number else reference()
            given = _first_gradient(other) if other is not None else None
            self._used[index] += index == number and index in self._pending
            before, version, times = self._pending.get(index, (None, -1, 0))
            if before is not None and before() is not given:
                self._dropped[index] += times
                times = 0
            if given is None or index == number:
                times = 0
            elif before is None or before() is not given or given._version != version:
                times += 1  # a backward pass reached it since
            now = None if given is None else weakref.ref(given)
            self._pending[index] = now, -1 if given is None else given._version, times

    def _count(self, mark: Mark) -> None:
        self.counts[mark] += 1
        if self._seen is not None:
            self._seen(mark)

    def _called(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Record a call, as a forward pre-hook of all modules. It does not synchronize: ids are inspected in the
        end."""
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return
        if id(module) not in self._inside:
            self._add_root(module)
            self._watch_generate()
        elif isinstance(module, nn.Embedding) and module.padding_idx is not None and inputs:
            self._look(inputs[0], module.padding_idx)

    def _add_root(self, module: nn.Module) -> None:
        root, inside = id(module), {id(each) for each in module.modules()}

        def forget(reference: object) -> None:
            self._roots.pop(root, None)
            self._inside -= inside

        taken, kind = {mark for _, mark in self._roots.values()}, type(module).__qualname__
        number = next(i for i in range(len(self._roots) + 1) if (kind, i) not in taken)
        self._roots[root] = weakref.ref(module, forget), (kind, number)
        self._inside |= inside

    def _root(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Mark the calls of roots, as a forward hook of all modules."""
        if torch.compiler.is_compiling() or id(module) not in self._roots:
            return
        self._follow(module, args, kwargs, output)
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and _is_mask(mask) and len(self._masks) < LOOKS:
            self._masks.append((mask.detach()[:: -(-len(mask) // SEEN_ROWS)].clone(), mask.numel()))
        number = self._roots[id(module)][1]
        self._training[KINDS[3], number] = trains = module.training and torch.is_grad_enabled()
        if trains:
            self._trained = min(self._trained, time.perf_counter())
        self._mark(KINDS[3], number)

    def _follow(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Count the calls that get a tensor which the call before returned."""
        if self._calls >= LOOKS:
            return
        before = [each() for each in self._made.get(id(module), ())]
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        self._calls += 1
        self._chained += any(each is one for each in given for one in before)
        made = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
        self._made[id(module)] = [weakref.ref(each) for each in made if not any(each is one for one in given)]
        sequence = next((kwargs[name] for name in SEQUENCES if kwargs.get(name) is not None), args[0] if args else None)
        if isinstance(sequence, Tensor) and sequence.ndim > 1 and not torch.is_grad_enabled():
            shape, earlier = tuple(sequence.shape), self._shapes.get(id(module), ())
            self._shapes[id(module)] = shape
            grown = [now for now, last in zip(shape, earlier, strict=False) if now != last]
            if len(shape) == len(earlier) and len(grown) == 1 and sum(shape) == sum(earlier) + 1 and grown[0] > 2:
                self._lengths.append(grown[0])

    @property
    def chained(self) -> bool:
        """True if most calls of a module need the result of the call before."""
        return self._chained >= REPEATS and 2 * self._chained > self._calls

    @property
    def prefix(self) -> float:
        """Mean length of the sequences with one element more than in the call before; 0 if few calls get such ones."""
        enough = len(self._lengths) >= LATER and 2 * len(self._lengths) > self._calls
        return sum(self._lengths) / len(self._lengths) if enough else 0.0

    @property
    def unused(self) -> tuple[float, bool]:
        """Share of the parameters with gradients that no optimizer updates; True if they come before all others."""
        dropped: dict[int, float] = {}
        for index, times in self._dropped.items():
            optimizer, part = self._optimizers[index](), times / (times + self._used[index] or 1)
            groups = optimizer.param_groups if optimizer is not None else ()
            dropped |= {id(each): part for group in groups for each in group["params"]}
        parts = [
            (place, size, dropped.get(number, 0.0) if number in self._updated else 1.0)
            for number, (place, size) in self._graded.items()
        ]
        unused, used = ([each for each in parts if (each[2] > 0.5) is above] for above in (True, False))
        share = sum(size * part for _, size, part in parts) / (sum(size for _, size, _ in parts) or 1)
        before = bool(unused and used) and max(each[0] for each in unused) < min(each[0] for each in used)
        return (share if used else 0.0), before

    def _look(self, ids: Any, pad: int) -> None:
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[1] < 4 or ids.device.type == "meta":
            return
        if len(ids) and len(self._ids) < LOOKS:
            self._ids.append((ids.detach()[:: -(-len(ids) // SEEN_ROWS)].clone(), pad, ids.numel()))

    def _watch_generate(self) -> None:
        """Mark calls of transformers' ``generate``, where that has been imported."""
        module = sys.modules.get("transformers.generation.utils")
        kind = getattr(module, "GenerationMixin", None)
        if kind is None or self._generate is not None or self._seen is None:
            return
        self._generate, plain = kind, kind.generate

        @functools.wraps(plain)
        def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
            self._mark(KINDS[1], id(model))
            self._generating += 1
            try:
                return plain(model, *args, **kwargs)
            finally:
                self._generating -= 1

        kind.generate = generate
        self._undo.append(lambda: setattr(kind, "generate", plain))


def _first_gradient(optimizer: Any) -> Tensor | None:
    """Return the first gradient of an optimizer's parameters."""
    every = (each.grad for group in optimizer.param_groups for each in group["params"])
    return next((grad for grad in every if grad is not None), None)


def _is_mask(mask: Tensor) -> bool:
    return mask.ndim == 2 and mask.device.type != "meta" and mask.numel() > 0 and not mask.is_floating_point()


def _padded(ids: Tensor, pad: int) -> Tensor:
    """Return True for each id that is padding at an end of its row."""
    padded = ids == pad
    return (padded.flip(1).cumprod(1).flip(1) | padded.cumprod(1)) != 0


class UnprofiledSteps:
    """Times of steps without profiling, after warm-up.

    Args:
        least_s: the seconds that steps must have taken together.
    """

    FEWEST, WARMING, SLOWER, LONGEST_S = 3, 8, 1.5, 5.0

    def __init__(self, least_s: float = 0.3) -> None:
        self._least_s, self._dropped = least_s, 0
        self._last = time.perf_counter()
        self.seconds: list[float] = []

    def restart(self) -> None:
        """Exclude the step in progress."""
        self._last = time.perf_counter()

    def mark(self) -> bool:
        """Count a step that ended; return True if there are enough."""
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now
        while len(self.seconds) > 1 and self._dropped < self.WARMING:
            later = sorted(self.seconds[1:])
            if self.seconds[0] <= self.SLOWER * later[len(later) // 2]:
                break
            self.seconds.pop(0)  # it compiled, or filled caches
            self._dropped += 1
        spent = sum(self.seconds)
        enough = len(self.seconds) >= self.FEWEST and spent >= self._least_s
        return enough or (len(self.seconds) > 1 and spent >= self.LONGEST_S)

    @property
    def median(self) -> float:
        """Median seconds of a step; 0 if none has ended."""
        ordered = sorted(self.seconds)
        return ordered[len(ordered) // 2] if ordered else 0.0
