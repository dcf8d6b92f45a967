"""Kernels that begin while the kernel before still runs wait for it, and read only what is listed before they have.

What is read early was there before the step's first layer: a kernel lets the next one begin, so several kernels before
may still run. ``docs/understand/engine-gpu.md`` says who waits for whom.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import transect

OPS = Path(transect.__file__).parent / "ops"
WAITS = {"wait_for_previous", "after_previous", "gdc_wait", "_wait_in_one"}
BATCH = {"tables_ptr", "starts_ptr", "lengths_ptr"}
READ_EARLY = {
    # Factors and slots are written between two steps.
    "adapters/triton.py:expand_rows": {"b_ptr", "scale_ptr", "slots_ptr"},
    "adapters/triton.py:shrink_rows": {"a_ptr", "scale_ptr", "slots_ptr"},
    "paged/rotary_kv_write.py:_kernel": BATCH | {"cos_ptr", "sin_ptr"},
    "paged/decode.py:_decode": {"tables", "starts", "lengths"},
    "paged/decode_spans.py:_decode": {"starts", "lengths"},
    # Beside decodes it reads all it needs: see ``paged_attention.py``.
    "paged/prefill.py:_prefill": set(),
    "sampling/triton.py:_groups": {"temperature"},
    "sampling/triton.py:_settle": {"temperature", "top_k", "top_p", "min_p", "seeds", "choices", "positions"},
    "sampling/triton.py:_collect": {"temperature"},
    "sampling/triton.py:_choose": {"temperature", "top_k", "top_p", "min_p", "seeds", "choices", "positions"},
    # The kernel before clears the words, and is no dependent launch: it begins when x is there.
    "first/softmax_kernels.py:split_kernel": {"x_ptr"},
    "first/softmax_kernels.py:split_backward_kernel": {"g_ptr", "y_ptr"},
}
NO_DEPENDENT_LAUNCH = {"first/softmax_kernels.py:clear_kernel"}
"""Only lets the next one begin."""


@cache
def functions() -> dict[str, ast.FunctionDef]:
    """All functions of the package's kernels that are compiled, by file and name."""
    found = {}
    for path in sorted(OPS.rglob("*.py")):
        text = path.read_text()
        for node in ast.parse(text).body if re.search(r"^@.*kernel", text, re.MULTILINE) else ():
            if isinstance(node, ast.FunctionDef) and any("kernel" in ast.unparse(d) for d in node.decorator_list):
                found[f"{path.parent.name}/{path.name}:{node.name}"] = node
    return found


@cache
def by_name() -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in functions().values()}


@cache
def calls(node: ast.AST) -> list[tuple[str, ast.Call]]:
    """By the name of what is called; ``tl.load`` is load."""
    found = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    return [(ast.unparse(each.func).rpartition(".")[2], each) for each in found]


def inner(call: ast.Call) -> ast.FunctionDef | None:
    """The compiled function that is called."""
    return by_name().get(call.func.id) if isinstance(call.func, ast.Name) else None


def waits(body: list[ast.stmt]) -> bool:
    """Whether every way through it comes by a wait, where DEPENDENT_LAUNCH is on."""
    return any(waiting(statement) for statement in body)


@cache
def waiting(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.If):
        on = ast.unparse(statement.test) == "DEPENDENT_LAUNCH"
        return waits(statement.body) and (on or waits(statement.orelse))
    if isinstance(statement, ast.For | ast.While):
        return False
    found = calls(statement)
    return any(name in WAITS or (inner(call) and waits(inner(call).body)) for name, call in found)  # type: ignore


def root(node: ast.expr) -> str:
    """Where an address comes from: the pointer that something is added to."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.BinOp):
            node = node.left
        elif isinstance(node, ast.IfExp):
            node = node.body
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func.value
        else:
            return ""
    return node.id


@cache
def read_early(function: ast.FunctionDef) -> set[str]:
    """The parameters that loads read from before a wait."""
    own = [parameter.arg for parameter in function.args.args]
    begin = {name: name for name in own}
    found: set[str] = set()

    def go(body: list[ast.stmt]) -> bool:
        """False: there the wait is."""
        for statement in body:
            if isinstance(statement, ast.If):
                both = [go(statement.body), go(statement.orelse)]
                if not any(both):
                    return False
                continue
            if waiting(statement):
                return False
            for name, call in calls(statement):
                called = inner(call)
                if name == "load":
                    found.add(begin.get(root(call.args[0]), ""))
                elif called is not None:
                    taken = read_early(called)
                    names = [parameter.arg for parameter in called.args.args]
                    found.update(begin.get(root(a), "") for n, a in zip(names, call.args, strict=False) if n in taken)
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                begin[statement.targets[0].id] = begin.get(root(statement.value), "")
        return True

    go(function.body)
    return found & set(own)


def launched() -> dict[str, ast.FunctionDef]:
    """The kernels that may be launched so: those that know of it and are not part of others."""
    parts = {name for node in functions().values() for name, _ in calls(node)}
    return {
        name: node
        for name, node in functions().items()
        if "DEPENDENT_LAUNCH" in {a.arg for a in node.args.args} and node.name not in parts
    }


@pytest.mark.parametrize("name", sorted(launched()))
def test_each_triton_kernel_waits_and_reads_early_only_what_is_listed(name: str) -> None:
    kernel = launched()[name]
    assert waits(kernel.body) == (name not in NO_DEPENDENT_LAUNCH)
    if name not in NO_DEPENDENT_LAUNCH:
        assert read_early(kernel) == READ_EARLY.get(name, set())


@pytest.mark.parametrize(
    "name", ["comm/ring_copy.py:_copy_row", "position/embed_tokens.py:_embed", "norm/rms_norm.py:forward_kernel"]
)
def test_what_is_read_early_is_done_when_the_first_kernels_let_others_begin(name: str) -> None:
    assert re.search(r"wait_for_previous\(DEPENDENT_LAUNCH\)\s+let_next_begin\(", ast.unparse(launched()[name]))


def test_the_lists_are_of_kernels() -> None:
    assert launched().keys() >= READ_EARLY.keys() | NO_DEPENDENT_LAUNCH and len(launched()) > 20


def sources() -> list[Path]:
    """CUDA sources with kernels that are launched so."""
    found = [path for ending in ("*.cu", "*.cuh") for path in OPS.rglob(ending)]
    return [
        path for path in sorted(found) if "__global__" in (text := path.read_text()) and "let_next_begin();" in text
    ]


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.name)
def test_each_cuda_kernel_waits(path: Path) -> None:
    for kernel in path.read_text().split("__global__")[1:]:
        found = re.findall(r"^ *(?:if \((.*)\) )?wait_for_previous\(\);", kernel.split("\n}\n")[0], re.MULTILINE)
        more = {"SCALES", "SCALES || BLOCKED"}  # those that read scales, which nobody fetches for them, wait as well
        assert set(found) & {"", "!waited", "number == 0"} or set(found) - more == {"ahead", "!ahead"}
