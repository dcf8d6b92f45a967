"""``Rung``: one exercise of the ladder, and the parts that its record is made of.

A rung's file holds one ``Rung``, and the docstring of the file is the page that the student reads. Everything else
(the folder that ``start`` writes, the grading, the list, the map of the docs) is derived from the record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..costs.work import Cost

ROADS = ("arithmetic", "tensors", "kernels", "serving", "training", "fleet", "interview")
"""Parts of the ladder in their order; a folder of ``rungs/`` each."""

PLACES = (
    *("empty", "empty_like", "new_empty", "empty_strided", "zeros", "zeros_like", "new_zeros", "full", "scalar_tensor"),
    *("view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "select"),
    *("slice", "as_strided", "alias", "detach", "clone", "contiguous", "copy_", "_to_copy", "set_", "fill_", "zero_"),
    *("lift_fresh", "_local_scalar_dense", "unbind", "split", "split_with_sizes", "_reshape_alias", "_conj"),
)
"""torch operators that only make room or look at it in another way: kernels may use these and no others."""


@dataclass(frozen=True, slots=True)
class Case:
    """One set of inputs: a shape, a dtype, an edge."""

    name: str
    make: Callable[[Any], Sequence[Any]]
    """Draws positional arguments from a ``numpy.random.Generator``; other ones in every check."""
    teaches: str
    """A teacher's sentence, for the student whose first failure is this case."""
    entry: str = ""
    """Name in ``Rung.answers``; empty: the first."""
    tolerance: float | None = None
    """Largest relative error in the 2-norm; None for the rung's tolerance."""


@dataclass(frozen=True, slots=True)
class Slip:
    """A well-known mistake: the wrong answer that it gives, and the sentence for the student who made it."""

    answer: Callable[..., Any]
    teaches: str
    entry: str = ""


@dataclass(frozen=True, slots=True)
class Speed:
    """The inputs to measure on, and the least work that they need."""

    make: Callable[[Any], Sequence[Any]]
    slow: str
    """A teacher's sentence, for the student whose solution does ``ratio`` times the work of the shipped one."""
    cost: Callable[..., Cost] | None = None
    """The least work, from the arguments; None for bookkeeping, which has no floor."""
    ratio: float = 2.0
    entry: str = ""
    dtype: str = "float32"
    """The matrix rate for the floor."""
    calls: int = 3
    peer: str = ""
    """Source of a program with the same entry, written with torch's own operators."""
    measure: Callable[..., float] | None = None
    """A function of (arguments, result): the size of the result's work, in ``unit``, counted in place of the program's
    own work. For policies: steps, seconds of a virtual clock, bytes sent."""
    unit: str = ""
    large: Callable[[Any], Sequence[Any]] | None = None
    """The inputs on a GPU, where the small ones would measure the launch alone; None if ``make`` is large enough."""


@dataclass(frozen=True, slots=True)
class ToCompile:
    """One Triton kernel of the solution, to be compiled ahead of time; see ``ops.registry.Kernel``."""

    name: str
    arguments: Mapping[str, str]
    constants: Mapping[str, Any]
    divisible: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Live:
    """Place of a rung inside the product, for ``learn use``."""

    runs: str
    """The command: ``serve`` (the demo's eight chats), ``train`` (a short run), ``fleet`` (the planner's simulator) or
    ``ops`` (an operator's benchmark on a GPU)."""
    pieces: Mapping[str, Callable[[Any, Any], Any] | None]
    """By ``module:attribute`` of the product: a function of (the student's module, the shipped attribute) that makes
    the replacement; None for the student's attribute of the same name. A key without a colon is an option of the
    command that takes ``FILE.py:Class``, or an argument of the simulator."""
    options: tuple[str, ...] = ()
    """Options of the command."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of each chat, or of the training run."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One exercise. ``solution`` is a whole program; ``holes`` names the functions whose bodies the student writes."""

    name: str
    title: str
    road: str
    place: int
    """Position on its road."""
    kind: str
    """``python``, ``torch``, ``triton``, ``cpp`` or ``dialogue``."""
    solution: str
    answers: Mapping[str, Callable[..., Any]]
    """By entry: the exact answer in float64, computed by the grader from the same arguments."""
    cases: tuple[Case, ...]
    hints: tuple[str, ...]
    holes: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    """Rungs to climb before; the list shows what each unlocks."""
    drives: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """By entry: a function of (the student's module, arguments) that the grader's child runs in place of a call. It
    stands alone: imports are inside."""
    judges: Mapping[str, Callable[..., str]] = field(default_factory=dict)
    """By entry: for answers that are not unique. A function of (arguments, result): a sentence that says what is wrong,
    or an empty string."""
    scales: Mapping[str, Callable[..., float]] = field(default_factory=dict)
    """By entry: a function of the exact arguments that errors are relative to, in place of the norm of the answer. For
    sums of signed numbers, which may cancel: a norm of the inputs."""
    slips: tuple[Slip, ...] = ()
    speed: Speed | None = None
    forbids: tuple[str, ...] = ()
    """torch operators that may not be called, by name. A kernel may call ``PLACES`` alone."""
    permits: tuple[str, ...] = ()
    """Operators of torch that a kernel's launcher may use beside ``PLACES``."""
    allows: tuple[str, ...] = ()
    """Modules of transect that the student's program may import."""
    compiled: tuple[ToCompile, ...] = ()
    tolerance: float = 1e-5
    minutes: int = 45
    differences: str = ""
    """A paragraph for ``learn show``: how the shipped code goes further, and why."""
    shipped: str = ""
    """The file of the package that the solution is taken from, or leads to."""
    live: Live | None = None
    """Its place inside the product; None if it has none."""
    apart: str = ""
    """Reason that it has none, for ``learn use``; empty for a step on the way."""
    page: str = ""
    """Filled in by the registry from the docstring of the file."""
    own_file: str = ""
    """Path of the record, filled in by the registry if a teacher keeps it outside this package."""

    @property
    def entry(self) -> str:
        """The entry of cases that name none."""
        return next(iter(self.answers))

    @property
    def called(self) -> str:
        """The rung as commands name it: its name, or the path of a teacher's own file."""
        return self.own_file or self.name

    @property
    def file(self) -> str:
        """Name of the file that the student writes."""
        return f"{self.name}.{'cpp' if self.kind == 'cpp' else 'py'}"

    @property
    def counts(self) -> str:
        """The work that is counted to tell a slow solution: ``lines`` of Python that ran, ``bytes`` that torch's
        operators read and wrote, ``traffic``: bytes of memory sectors that a kernel touched, or ``lines of cache`` that
        a C++ program fetched."""
        if self.speed is not None and self.speed.measure is not None:
            return ""
        return {"torch": "bytes", "triton": "traffic", "python": "lines", "cpp": "lines of cache"}.get(self.kind, "")
