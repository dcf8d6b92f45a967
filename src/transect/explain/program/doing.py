"""Classifies the work that a Python stack shows: its kind, and the user's line that caused it.

The innermost frames decide if they can: a library that waits, imports, logs, starts a process, tokenizes text. Else the
text of the user's line decides, but only if that line itself is running: ``print(pool.map(f))`` waits for a pool, and
prints for a moment.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass

from .sampler import Frame

OURS = "/transect/explain/"
"""Path of the code that runs and observes the user's program."""
RUNS = "/transect/explain/program/script.py"
"""Path of the code that runs a script: frames outside of it are not the script's."""
LIBRARY = (
    sysconfig.get_paths()["stdlib"],
    sysconfig.get_paths()["purelib"],
    "/lib/python3.",
    "/site-packages/",
    "/dist-packages/",
    "<frozen",
    "/torch/",
    "/torchinductor_",
    OURS,
)
"""Folders whose files are not the user's."""
LEVELS = r"(?:debug|info|warn\w*|error|exception)\("
LOG = r"(?<!math)(?<!torch)(?<!\bnp)(?<!numpy)\.log\((?!\))"
"""Pattern of logging calls, excluding logarithms."""
LINES = (
    ("logging", re.compile(rf"\bprint\(|\.write\(|\.flush\(|fsync|\blogg(?:er|ing)\b|\blog\.{LEVELS}|{LOG}")),
    ("sleep", re.compile(r"\bsleep\(")),
    ("parse", re.compile(r"\b(?:u|or|simd)?json\.loads\(|literal_eval\(|yaml\.\w*load\(")),
    ("saving", re.compile(r"\bimwrite\(|\bpickle\.dump\(")),
    (
        "file",
        re.compile(
            r"\.load\(|\bopen\(|\.read\(|read_bytes|read_text|imread|pickle|loads\(|loadtxt\(|genfromtxt\("
            r"|\bread_(?:csv|parquet|json|table|feather|pickle|excel|image|video)\("
        ),
    ),
    ("collection", re.compile(r"gc\.collect")),
    ("process", re.compile(r"\bos\.(?:system|popen)\(")),
)
"""Kinds of work by the text of the user's line, if that line is the innermost."""
COMPREHENSION = re.compile(r"[\[({].*\sfor\s.*\sin\s", re.S)
"""Statement with a loop inside, which takes longer than what is done with its result."""
READS = ("parse", "file", "saving")
"""Kinds that are determined by the user's line for any library."""
WRITERS = re.compile(r"/(?:loguru|absl|structlog|rich|tqdm|wandb|tensorboard\w*|encodings)/|/codecs\.py$")
"""Libraries that may appear in a line that logs."""
CALLERS = re.compile(
    r"/(?:torch|transformers|accelerate|peft|trl|diffusers|lightning\w*|pytorch_lightning|torch_geometric|timm"
    r"|sentence_transformers|torchvision/models|torchvision/ops)/"
)
"""Libraries that mostly call operators: their Python code between operators is the cost of calling these."""
ARRAYS = re.compile(r"/(?:numpy|scipy|PIL|cv2|sklearn|pandas|librosa|soxr|numba)/")
NUMPY = re.compile(r"\b(?:np|numpy)\.")
"""Libraries that compute without operators of torch, and a call of numpy in a line."""
MODELS = re.compile(rf"{CALLERS.pattern.replace('torch|', '')}|/torch/nn/modules/|/torch/optim/")
"""Files of models and optimizers: the operators that they call, and their order, are not the user's to change."""
NATIVE = "/transect/ops/cpu/"
"""Path of code that calls C++ kernels, which no profiler sees."""
COMPILER_FILES = (
    "_dynamo/convert_frame",
    "_dynamo/symbolic_convert",
    "_dynamo/output_graph",
    "_inductor/compile_fx",
    "_inductor/async_compile",
    "_inductor/runtime/benchmarking",
    "triton/compiler/",
)
"""Files that only compile; other files of dynamo and inductor run in every call of compiled code."""
PYTHONS_OWN = f"{sysconfig.get_paths()['stdlib']}/tokenize.py"
"""Tokenizer of Python's own source, used when a source line is looked up."""
IMPORTS = "<frozen importlib"
LIBRARIES = (
    (
        "logging",
        re.compile(
            r"/(?:tensorboard\w*|wandb|mlflow|comet_ml|aim|clearml|neptune)/"
            r"|/(?:lightning\w*|pytorch_lightning)/.*/(?:loggers|logger_connector)/"
            r"|/tqdm/\w+\.py:(?:update|refresh|display|set_postfix\w*|set_description\w*)$|/rich/progress\.py:update$"
        ),
    ),
    (
        "building",
        re.compile(
            r":from_pretrained$|/torch/nn/(?:modules/\w+\.py:(?:__init__|reset_parameters|load_state_dict)$|init\.py:)"
        ),
    ),
    ("stacks", re.compile(r"/traceback\.py:format_stack$")),
    ("printing", re.compile(r"/torch/_tensor_str\.py:")),
    (
        "saving",
        re.compile(
            r"/torch/serialization\.py:save$|/safetensors/\w+\.py:save_file$|/torchvision/utils\.py:save_image$"
            r"|/PIL/Image\.py:save$|/torchaudio/.*:save$|/imageio/.*:imwrite$|/soundfile\.py:write$"
            r"|/matplotlib/.*:savefig$|/numpy/lib/\w+\.py:save(?:z|z_compressed|txt)?$"
            r"|/pandas/.*:to_(?:csv|parquet|pickle|json|feather|hdf|excel)$|/json/__init__\.py:dump$"
        ),
    ),
    ("copying", re.compile(r"/copy\.py:deepcopy$")),
    ("optimizer", re.compile(r"/torch/optim/\w+\.py:_single_tensor_")),
)
"""Kinds of work by the function of a library, including its callees."""
ADAPTER = re.compile(r"/peft/tuners/\w+/layer\.py$")
"""Files of layers of peft."""
RUN = ("run", "call", "check_call", "check_output", "getoutput", "getstatusoutput")
"""Functions of ``subprocess`` that start a process and wait for its end."""
FORKS = ("_acquireLock", "_releaseLock", "_afterFork")
"""Functions of ``logging`` that run at every fork."""
STARTS = re.compile(r"multiprocessing/(?:popen_\w+|process|context|spawn|resource_tracker|util)\.py$")
WAITS = re.compile(r"/(?:threading|queue|selectors|socket|ssl|subprocess|synchronize)\.py$|multiprocessing/connection")
WAITING = ("wait", "poll", "join", "recv", "_try_wait", "_communicate")
"""Functions in which the parent waits for the start or end of a process."""


PREPARES = re.compile(
    r"/transformers/.*(?:feature_extraction|image_processing|image_transforms|video_processing|audio_utils)"
    r"|/torchvision/transforms/|/torchaudio/(?:transforms|functional|compliance)|/librosa/"
)
"""Files of libraries that make a model's inputs."""
EVALUATES = re.compile(r"/transformers/trainer\.py:evaluate$|/(?:pytorch_)?lightning/.*/evaluation_loop\.py:run$")
"""Functions of trainers that evaluate a model."""
WHOLE = (
    *("stacks", "printing", "saving", "building", "copying", "optimizer", "adapters", "hooks", "preparing"),
    "evaluation",
)
"""Kinds that include the operators called for them, not only the gaps between these."""


@dataclass(frozen=True, slots=True)
class Doing:
    """Work of the host: a part, a kind (``tokenize``, ``logging``, ``sleep``, ...), and the user's line."""

    part: str
    kind: str
    frame: Frame | None


def user_stack(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return a stack without the frames that run the script or the explanation."""
    return tuple(f for f in itertools.takewhile(lambda f: not f.file.endswith(RUNS), stack) if OURS not in f.file)


def is_users(frame: Frame) -> bool:
    """Return True if a line is in no library."""
    return not any(part in frame.file for part in LIBRARY)


def in_loader(stack: tuple[Frame, ...]) -> bool:
    """Return True if a stack is in a ``DataLoader``."""
    return any(each.function == "__next__" and each.file.endswith("/utils/data/dataloader.py") for each in stack)


@functools.lru_cache(maxsize=10_000)
def calls_itself(stack: tuple[Frame, ...]) -> bool:
    """Return True if the user's line calls operators itself, not through a model, an optimizer or a backward pass."""
    inner = itertools.takewhile(lambda frame: not is_users(frame), stack)
    elsewhere = "_engine_run_backward", "synchronize"
    return not any(MODELS.search(frame.file) or frame.function in elsewhere for frame in inner)


def in_hook(stack: tuple[Frame, ...]) -> bool:
    """Return True if a stack is in a function of the user that a module calls as a hook."""
    for index in range(1, len(stack)):
        inner, caller = stack[index - 1], stack[index]
        if caller.function in ("_call_impl", "inner") and caller.file.endswith("/torch/nn/modules/module.py"):
            if not is_users(inner) or inner.function == "forward":
                continue
            return all(frame.function != "forward" or frame.file != inner.file for frame in stack[:index])
    return False


def waits_for_gpu(stack: tuple[Frame, ...]) -> bool:
    """Return True if a stack synchronizes with a GPU."""
    return any(frame.function == "synchronize" and "/torch/cuda/" in frame.file for frame in stack)


@functools.lru_cache(maxsize=10_000)
def doing_of(stack: tuple[Frame, ...]) -> Doing:
    """Classify a stack, given innermost frame first."""
    stack = tuple(itertools.takewhile(lambda frame: not frame.file.endswith(RUNS), stack))
    user = next(filter(is_users, stack), None)
    if stack and NATIVE in stack[0].file:
        return Doing("unrated", "native", user)
    inner = list(stack) if user is None else list(stack[: stack.index(user)])
    inner = [frame for frame in inner if OURS not in frame.file]
    if any(part in frame.file for frame in stack for part in COMPILER_FILES):
        return Doing("recompilation", "compile", user)
    if _computes_again(stack):
        return Doing("launch", "recomputation", user)
    if any(IMPORTS in frame.file for frame in inner):
        return Doing("host", "import", user)
    for frame in stack:
        if frame.file == PYTHONS_OWN:
            continue
        if "tokeniz" in frame.file.lower() or "tokeniz" in frame.function.lower():
            return Doing("host", "tokenize", user)
        if "/logging/" in frame.file and frame.function not in FORKS:
            return Doing("host", "logging", user)
    kind = _by_library(inner) or _by_adapter(inner) or _by_line(inner, user)
    if kind == "python" and any(CALLERS.search(frame.file) for frame in inner) and not _computes(inner[0]):
        return Doing("launch", "calls", user)
    return Doing("loading" if kind == "file" else "host", kind, user)


@functools.lru_cache(maxsize=10_000)
def whole_kind(stack: tuple[Frame, ...]) -> str:
    """Return the kind of a stack's work, of which hooks and the preparation of inputs contain others."""
    if any(EVALUATES.search(f"{frame.file}:{frame.function}") for frame in stack):
        return "evaluation"
    if in_loader(stack):
        return ""
    kind = doing_of(stack).kind
    if kind not in WHOLE and in_hook(stack):
        return "hooks"
    if kind in ("calls", "python") and any(PREPARES.search(frame.file) for frame in user_stack(stack)):
        return "preparing"
    return kind


def _computes_again(stack: tuple[Frame, ...]) -> bool:
    """Return True if activation checkpointing computes a layer again."""
    for frame in stack:
        if frame.file.endswith("/torch/utils/checkpoint.py"):
            return frame.function in ("recompute_fn", "unpack_hook", "backward")
        if frame.function == "_engine_run_backward":
            return False
    return False


def _computes(frame: Frame) -> bool:
    """Return True if a line is in a library for arrays or pictures, or calls numpy."""
    return bool(ARRAYS.search(frame.file) or NUMPY.search(linecache.getline(frame.file, frame.line)))


def _by_library(inner: Sequence[Frame]) -> str:
    """Classify the work of a library by its files; empty if they do not decide."""
    for frame in reversed(inner):
        for kind, place in LIBRARIES:
            if place.search(f"{frame.file}:{frame.function}"):
                return kind
        if frame.function == "_execute_child" or (frame.file.endswith("/subprocess.py") and frame.function in RUN):
            return "process"
    starts = any(STARTS.search(frame.file) for frame in inner)
    if inner and (WAITS.search(inner[0].file) or (starts and inner[0].function in WAITING)):
        return "wait"
    return "process" if starts else ""


def statement(file: str, line: int) -> str:
    """Return the text of the statement that a line belongs to; of a loop or a condition only its head."""
    return _statements(file).get(line) or linecache.getline(file, line)


@functools.lru_cache(maxsize=200)
def _nodes(file: str) -> list[ast.AST]:
    """Return the nodes of a file's syntax; an empty list if it cannot be parsed."""
    try:
        return list(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except (SyntaxError, ValueError):
        return []


@functools.lru_cache(maxsize=200)
def _statements(file: str) -> dict[int, str]:
    """Return the text of the statement at each line of a file that has statements of several lines."""
    lines, found = linecache.getlines(file), dict[int, str]()
    for node in _nodes(file):
        if isinstance(node, ast.stmt) and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            if last > node.lineno:
                text = "".join(lines[node.lineno - 1 : last])
                found |= dict.fromkeys(range(node.lineno, last + 1), text)
    return found


@functools.lru_cache(maxsize=200)
def _loops(file: str) -> list[tuple[int, int, ast.AST]]:
    """Return (first line, last line, node) of the loops and comprehensions of a file, inner ones last. A loop that
    calls what it goes over, such as layers, is none: nothing can compute them at once."""
    kinds = ast.For, ast.While, ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp
    nodes = [node for node in _nodes(file) if isinstance(node, kinds) and not _over_layers(node)]
    spans = [(node.lineno, node.end_lineno or node.lineno, node) for node in nodes]
    return sorted(spans, key=lambda span: span[0] - span[1])


def _over_layers(node: ast.AST) -> bool:
    """Return True if a loop calls what it goes over."""
    name = node.target.id if isinstance(node, ast.For) and isinstance(node.target, ast.Name) else None
    calls = (each.func for each in ast.walk(node) if isinstance(each, ast.Call)) if name else ()
    return any(isinstance(each, ast.Name) and each.id == name for each in calls)


def loop_around(stack: tuple[Frame, ...]) -> tuple[str, int]:
    """Return file and first line of the innermost loop of the user that a stack is in; ("", 0) if there is none."""
    mine = filter(is_users, user_stack(stack))
    return next((loop for frame in mine if (loop := loop_at(frame))[0]), ("", 0))


@functools.lru_cache(maxsize=200)
def needs_itself(loop: tuple[str, int]) -> bool:
    """Return True if a loop computes a variable from its value of the iteration before."""
    file, line = loop
    carried, fresh = set[str](), set[str]()
    for node in itertools.chain.from_iterable(ast.walk(node) for first, _, node in _loops(file) if first == line):
        if isinstance(node, ast.Assign):
            targets = {each.id for each in node.targets if isinstance(each, ast.Name)}
            used = {each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)}
            carried |= targets & used
            fresh |= targets - used
        elif isinstance(node, ast.For):
            fresh |= {each.id for each in ast.walk(node.target) if isinstance(each, ast.Name)}
    return bool(carried - fresh)


def loops_around(file: str, first: int) -> list[int]:
    """Return the first lines of the loops around the one that begins at a line."""
    last = max((last for begin, last, _ in _loops(file) if begin == first), default=first)
    return [begin for begin, end, _ in _loops(file) if begin < first and last <= end]


def loop_at(frame: Frame | None) -> tuple[str, int]:
    """Return file and first line of the innermost loop around a line; ("", 0) if there is none."""
    spans = _loops(frame.file) if frame is not None else []
    around = [first for first, last, _ in spans if frame is not None and first <= frame.line <= last]
    return (frame.file, around[-1]) if frame is not None and around else ("", 0)


def _by_adapter(inner: Sequence[Frame]) -> str:
    """Return "adapters" in an adapter of peft, but for the layer that it adapts; else an empty string."""
    frame = next((each for each in inner if ADAPTER.search(each.file) and each.function == "forward"), None)
    return "adapters" if frame is not None and "base_layer(" not in statement(frame.file, frame.line) else ""


def _by_line(inner: Sequence[Frame], user: Frame | None) -> str:
    """Classify by the text of the user's line, which called the ``inner`` frames."""
    text = statement(user.file, user.line) if user is not None else ""
    alone = all(WRITERS.search(frame.file) for frame in inner) and not COMPREHENSION.search(text)
    return next((kind for kind, each in LINES if (alone or kind in READS) and each.search(text)), "python")
