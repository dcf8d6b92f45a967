"""Traces from files: any size, packed, torn, foreign; and what a GPU's trace is split into."""

import gzip
import json
import os
import subprocess
import sys
import sysconfig
import tracemalloc

import pytest
from commands import run_here
from planted_faults import ceilings

from transect.costs.presets import preset
from transect.explain.program.doing import doing_of
from transect.explain.program.explain import explain_trace
from transect.explain.program.report_html import page
from transect.explain.program.sampler import Frame, Sample, StackSamples
from transect.explain.program.trace import kernel_name
from transect.explain.program.trace_file import PIECE, read_trace


def event(cat, name, begin, length, tid=1, **args):
    """An event; times are microseconds."""
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": length, "pid": 1, "tid": tid, "args": args}


def gpu_step(begin, number):
    """A step of 100 us: a product of 40 us, a copy of 10, then nothing while the host waits for a value."""
    mm = {"Input Dims": [[512, 512], [512, 512]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    return [
        event("cpu_op", "aten::mm", begin, 20, **mm, **{"External id": 3 * number}),
        event("cuda_runtime", "cudaLaunchKernel", begin + 5, 5, correlation=7 * number),
        event("kernel", "gemm_bf16", begin + 10, 40, tid=7, **{"External id": 3 * number}),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", begin + 50, 10, tid=7, bytes=4),
        event("cpu_op", "aten::item", begin + 25, 65, **{"External id": 3 * number + 1}),
        event("cuda_runtime", "cudaStreamSynchronize", begin + 30, 55),
    ]


def write(path, events, **head):
    path.write_text(json.dumps({"schemaVersion": 1, **head, "traceEvents": events, "traceName": "x"}))
    return path


@pytest.fixture
def gpu_trace(tmp_path):
    steps = [each for number in range(1, 21) for each in gpu_step(100.0 * number, number)]
    return write(tmp_path / "gpu.json", [*steps, event("kernel", "ncclDevKernel_AllReduce", 2160, 40, tid=8)])


def test_a_gpu_trace_is_split_exactly(gpu_trace):
    """The parts are those that the events were laid out with."""
    limits = preset("h200").ceilings()
    found = explain_trace(read_trace(gpu_trace), limits)
    parts = {name: 1e6 * seconds for name, seconds in found.split.parts.items() if seconds}
    assert found.split.on_gpu and sum(parts.values()) == pytest.approx(1e6 * found.split.wall)
    assert parts["copies"] == pytest.approx(200) and parts["communication"] == pytest.approx(40)
    floor = 20 * 1e6 * max(2 * 512**3 / limits.rate("bfloat16"), 3 * 512 * 512 * 2 / limits.copy_bytes_per_second)
    assert parts["floor"] == pytest.approx(floor)
    assert parts["floor"] + parts["inefficiency"] == pytest.approx(800)
    assert parts["sync"] == pytest.approx(20 * 50, rel=0.1)
    assert found.findings[0].kind == "sync"


def launched(name, shapes, types, begin, length, number, kernel="kernel"):
    """An operator, and the kernel that it launches."""
    dims = {"Input Dims": shapes, "Input type": types, "External id": number}
    return [
        event("cpu_op", name, begin, 8, **dims),
        event("cuda_runtime", "cudaLaunchKernel", begin + 3, 4),
        event("kernel", kernel, begin + 10, length, tid=7, **{"External id": number}),
    ]


def test_a_larger_batch_is_promised_what_products_reach(tmp_path):
    """Weights of 16 MB are read 96 times; all rows together are bound by arithmetic, at half of 100 GFLOP/s."""
    dims = {"Input Dims": [[1, 2048], [2048, 2048]], "Input type": ["float", "float"]}
    events = [event("cpu_op", "aten::mm", 1000.0 * number, 900, **dims) for number in range(96)]
    found = explain_trace(read_trace(write(tmp_path / "small.json", events)), ceilings())
    (small,) = (each for each in found.findings if each.kind == "small batch")
    efficiency = (2048 * 2048 + 2 * 2048) * 4 / 20e9 / 900e-6
    assert small.gain == pytest.approx(96 * 900e-6 - 2 * 96 * 2048**2 / 50e9 / efficiency, rel=0.01)


def test_a_copy_that_waits_on_amd_is_a_wait(tmp_path):
    """torch reads values there by a call of its own, which is no launch."""
    events = []
    for number in range(20):
        begin = 1000.0 * number
        events += launched("aten::mm", [[64, 64], [64, 64]], ["float", "float"], begin, 400, number, "Cijk_Ailk_Bljk")
        events.append(event("cuda_runtime", "hipMemcpyWithStream", begin + 20, 900))
    found = explain_trace(read_trace(write(tmp_path / "amd.json", events)), preset("mi300x").ceilings())
    assert found.split.parts["sync"] == pytest.approx(19 * 600e-6, rel=0.05) and not found.split.parts["host"]
    assert found.findings[0].kind == "sync"


def test_what_the_profiler_does_before_it_begins_is_not_the_programs(tmp_path):
    """It launches a first kernel and waits for it; the program waits 20 times, the last time for all to end."""
    steps = [each for number in range(30, 50) for each in gpu_step(100.0 * number, number)]
    before = [event("cuda_runtime", "cudaDeviceSynchronize", 100, 2000), event("kernel", "neg", 1900, 10, tid=7)]
    window = event("user_annotation", "transect.explain", 3000, 2000)
    found = explain_trace(read_trace(write(tmp_path / "w.json", [*before, window, *steps])), preset("h200").ceilings())
    assert found.split.wall == pytest.approx(2e-3) and found.split.parts["sync"] == pytest.approx(1e-3, rel=0.1)
    (sync,) = (each for each in found.findings if each.kind == "sync")
    assert sync.evidence.startswith("19 times") and sync.gain < 1.2e-3


def test_a_program_without_kernels_is_none_of_a_gpu(tmp_path):
    """Though the profiler launched one before it."""
    events = [event("kernel", "neg", 100, 10, tid=7), event("user_annotation", "transect.explain", 3000, 2000)]
    events += [event("cpu_op", "aten::mm", 3100, 1500, **{"Input Dims": [[8, 8], [8, 8]], "Input type": ["float"] * 2})]
    trace = read_trace(write(tmp_path / "p.json", events))
    assert trace.on_gpu
    found = explain_trace(trace, ceilings())
    assert not trace.on_gpu and not found.split.on_gpu and found.split.wall == pytest.approx(2e-3)
    assert found.split.ops[0].key.name == "aten::mm"


def test_compiling_is_no_operator_on_the_host(tmp_path):
    """torch.compile works for milliseconds without a call of the driver, and operators that it runs are its own."""
    events = []
    for number in range(4):
        begin = 5000.0 * number
        events += [event("cpu_op", "dynamo", begin, 4000), event("cpu_op", "aten::ones", begin + 500, 2000)]
        events += launched("aten::mul", [[64, 64], [64, 64]], ["float", "float"], begin + 4100, 50, number)
    found = explain_trace(read_trace(write(tmp_path / "c.json", events)), preset("h200").ceilings())
    assert [each.kind for each in found.findings] == ["recompilation"], str(found)
    assert found.findings[0].gain == pytest.approx(0.75 * found.split.parts["recompilation"])


@pytest.mark.parametrize(("compilations", "said"), [(2, 0.0), (4, 0.5)])
def test_a_backward_pass_is_compiled_once_too(tmp_path, compilations, said):
    events = [event("cpu_op", "dynamo", 5000.0 * number, 4000) for number in range(compilations)]
    events += [event("cpu_op", "MmBackward0", 25_000, 50)]
    found = explain_trace(read_trace(write(tmp_path / "c.json", events)), ceilings())
    gains = [each.gain for each in found.findings if each.kind == "recompilation"]
    assert sum(gains) == pytest.approx(said * found.split.parts["recompilation"])


@pytest.mark.parametrize(
    ("name", "short", "whole"),
    [
        ("void at::native::(anonymous namespace)::pick<float, 2>(f<int>, int)", "pick", "at::native::pick<float, 2>"),
        ("std::enable_if<!(false), void>::type gemvx::kernel<int>(P<float>)", "gemvx::kernel", "gemvx::kernel<int>"),
        ("void small_rows<(Format)0, 2>(float const*)", "small_rows", "small_rows<(Format)0, 2>"),
        ("nvjet_sm90_tst_256x128", "nvjet_sm90_tst_256x128", "nvjet_sm90_tst_256x128"),
        ("Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH (Device -> Pinned)"),
    ],
)
def test_kernels_have_short_names(name, short, whole):
    assert kernel_name(name) == short and kernel_name(name, templates=True) == whole


def test_what_an_unknown_operator_computes_is_not_guessed(tmp_path):
    """Its kernel has no floor, and neither is it said to be above one; who knows the least of it all can say so."""
    events = launched("aten::mul", [[1 << 20], [1 << 20]], ["float", "float"], 0, 50, 1)
    events += launched("_NodeBackward", [[64, 64], [64, 64]], ["float", "float"], 100, 100, 2)
    events += launched("transect::linear_cross_entropy", [[64, 64], [64, 64]], ["float", "float"], 250, 50, 3)
    trace, limits = read_trace(write(tmp_path / "u.json", events)), preset("h200").ceilings()
    parts = explain_trace(trace, limits).split.parts
    assert parts["unrated"] == pytest.approx(150e-6) and 0 < parts["floor"] < 5e-6
    told = explain_trace(trace, limits, floor_s=80e-6).split.parts
    assert told["floor"] == pytest.approx(80e-6) and told["unrated"] == 0
    assert told["inefficiency"] == pytest.approx(200e-6 - 80e-6)


def test_python_between_kernels_is_named_by_samples(tmp_path):
    """Each step waits for a value, and then text is cut into words for 2 ms: that holds the GPU up, not the wait."""
    events, samples = [], StackSamples()
    line = (Frame("prepare.py", "tokenize", 7), Frame("train.py", "step", 3))
    for number in range(20):
        begin = 2100.0 * number
        events += launched("aten::mul", [[64, 64], [64, 64]], ["float", "float"], begin, 50, number)
        events.append(event("cuda_runtime", "cudaStreamSynchronize", begin + 10, 55))
        samples.samples += [Sample(1e-6 * (begin + late), line, 0) for late in (500, 1000, 1500)]
    found = explain_trace(
        read_trace(write(tmp_path / "gpu.json", events)), ceilings(), samples, facts={"backward": True}
    )
    assert found.findings[0].kind == "tokenize" and "tokenize (prepare.py:7)" in found.findings[0].evidence
    assert found.findings[0].gain == pytest.approx(19 * 2.05e-3, rel=0.01)
    assert found.split.parts["host"] == pytest.approx(19 * 2.05e-3, rel=0.01) and not found.split.parts["sync"]


@pytest.mark.parametrize(
    ("name", "shapes", "types", "kind"),
    [
        ("aten::copy_", [[512, 512], [512, 512], []], ["float", "c10::BFloat16", ""], "convert"),
        ("aten::copy_", [[512, 512], [512, 512], []], ["float", "float", ""], "layout"),
        ("aten::cat", [[[512, 512], [1, 512]], []], ["TensorList", ""], "layout"),
        ("aten::mm", [[1, 2048], [2048, 2048]], ["c10::BFloat16", "c10::BFloat16"], "small batch"),
        ("aten::add", [[512, 512], [512, 512]], ["double", "double"], "float64"),
    ],
)
def test_kernels_are_what_launched_them(tmp_path, name, shapes, types, kind):
    """A kernel's own name says little: what is found is found by the operator, its shapes and its types. The host waits
    for each kernel: beside a host that issues work all the time, shorter kernels would gain nothing."""
    steps = [launched(name, shapes, types, 60.0 * number, 50, number, "void kernel<float>") for number in range(40)]
    waits = [event("cuda_runtime", "cudaStreamSynchronize", 60.0 * number + 10, 48) for number in range(40)]
    trace = read_trace(write(tmp_path / "gpu.json", [each for step in steps for each in step] + waits))
    found = explain_trace(trace, preset("h200").ceilings())
    assert found.findings[0].kind == kind, str(found)
    assert (found.split.parts["copies"] > 0) == (kind in ("convert", "layout"))


def test_a_compiler_joins_what_stands_between_products(tmp_path):
    """A product and two operators behind it become two kernels, so a third of the calls goes."""
    names, shape, steps = ("aten::mm", "aten::add", "aten::mul"), [[8, 8], [8, 8]], []
    for number in range(120):
        steps += launched(names[number % 3], shape, ["float", "float"], 20.0 * number, 2, number)
    found = explain_trace(read_trace(write(tmp_path / "gpu.json", steps)), preset("h200").ceilings())
    (launch,) = (each for each in found.findings if each.kind == "launch")
    assert launch.gains["compile"] == pytest.approx(launch.gain / 3)


def test_a_library_between_calls_is_named(tmp_path):
    """A file that is read tensor by tensor: gaps between operators are short, and yet are not the calling of them."""
    script = tmp_path / "s.py"
    script.write_text("weights = torch.load(path)\n")
    stack = (Frame("/x/torch/serialization.py", "persistent_load", 9), Frame(str(script), "<module>", 1))
    events = [event("cpu_op", "aten::set_", 30.0 * number, 5) for number in range(200)]
    samples = StackSamples(samples=[Sample(30e-6 * number + 15e-6, stack, 0) for number in range(20, 180, 10)])
    found = explain_trace(read_trace(write(tmp_path / "cpu.json", events)), ceilings(), samples)
    assert found.findings[0].kind == "file" and found.findings[0].gain == pytest.approx(199 * 25e-6, rel=0.05)
    assert sum(found.split.parts.values()) == pytest.approx(found.split.wall)


def test_a_line_that_prints_what_a_module_computes_is_no_logging(tmp_path):
    script = tmp_path / "s.py"
    script.write_text("print(model(x))\n")
    user, module = Frame(str(script), "<module>", 1), Frame("/x/torch/nn/modules/linear.py", "forward", 120)
    assert doing_of((user,)).kind == "logging" and doing_of((module, user)).kind == "calls"


@pytest.mark.parametrize(
    ("line", "inner", "kind"),
    [
        ("print(pool.map(f, rows))", [("STDLIB/threading.py", "wait")], "wait"),
        ("print(pool.map(f, rows))", [("STDLIB/multiprocessing/popen_fork.py", "_launch")], "process"),
        ("with Pool(2) as pool:", [("STDLIB/logging/__init__.py", "_releaseLock")], "python"),
        (
            "process.join()",
            [("STDLIB/multiprocessing/popen_fork.py", "poll"), ("STDLIB/multiprocessing/process.py", "join")],
            "wait",
        ),
        ("found = urlopen(url).read()", [("STDLIB/socket.py", "readinto")], "wait"),
        ("subprocess.run(words)", [("STDLIB/subprocess.py", "_execute_child")], "process"),
        (
            "from big import model",
            [("/site-packages/big.py", "<module>"), ("<frozen importlib._bootstrap>", "_load")],
            "import",
        ),
        ("log.info(x)", [("/site-packages/loguru/_logger.py", "_log")], "logging"),
        ("x = numpy.load(path)", [("/site-packages/numpy/lib/npyio.py", "load")], "file"),
        ("print(x)", [], "logging"),
        (
            "torch.manual_seed(0)",
            [("STDLIB/tokenize.py", "_generate_tokens"), ("STDLIB/linecache.py", "get")],
            "python",
        ),
        ("ids = encode(text)", [("/site-packages/tokenizers/__init__.py", "encode")], "tokenize"),
        ("run.log({'loss': 1})", [], "logging"),
        ("y = math.log(x) + z.log()", [], "python"),
    ],
)
def test_the_innermost_library_says_what_a_line_does(tmp_path, line, inner, kind):
    script = tmp_path / "s.py"
    script.write_text(line + "\n")
    files = [(file.replace("STDLIB", sysconfig.get_paths()["stdlib"]), function) for file, function in inner]
    stack = (*(Frame(file, function, 1) for file, function in files), Frame(str(script), "<module>", 1))
    assert doing_of(stack).kind == kind and doing_of(stack).frame == stack[-1]
    below = (
        *stack,
        Frame("/x/transect/explain/program/script.py", "run", 9),
        Frame("/x/transect/__main__.py", "<module>", 6),
    )
    assert doing_of(below) == doing_of(stack) and doing_of(below[-2:]).frame is None


def test_an_independent_reading_agrees(gpu_trace):
    """Busy time of the GPU, by marking every microsecond."""
    marked = set()
    for each in json.loads(gpu_trace.read_text())["traceEvents"]:
        if each["cat"] in ("kernel", "gpu_memcpy"):
            marked.update(range(int(each["ts"]), int(each["ts"] + each["dur"])))
    parts = explain_trace(read_trace(gpu_trace), ceilings()).split.parts
    busy = sum(parts[name] for name in ("floor", "inefficiency", "unrated", "copies", "communication"))
    assert 1e6 * busy == pytest.approx(len(marked), abs=1)


def test_packed_torn_and_bare_traces(gpu_trace, tmp_path):
    whole = read_trace(gpu_trace)
    assert not whole.truncated and whole.head["traceName"] == "x"
    packed = tmp_path / "gpu.json.gz"
    packed.write_bytes(gzip.compress(gpu_trace.read_bytes()))
    assert read_trace(packed).size_kept == whole.size_kept
    torn = tmp_path / "torn.json"
    torn.write_bytes(gpu_trace.read_bytes()[:-4000])
    assert read_trace(torn).truncated and 50 < read_trace(torn).size_kept < whole.size_kept
    packed.write_bytes(packed.read_bytes()[:-200])
    assert read_trace(packed).truncated
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(json.loads(gpu_trace.read_text())["traceEvents"]))
    assert read_trace(bare).size_kept == whole.size_kept


@pytest.mark.parametrize(
    "text",
    ["", "hello", "{}", '{"traceEvents": []}', '{"traceEvents": 3}', '[1, 2, "x", null, {"ph": "X"}]', '{"a" 1}', "[}"],
)
def test_what_is_no_trace_is_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"not a Chrome trace|has no operators"):
        read_trace(tmp_path / "x.json")


def test_foreign_and_odd_events_are_left_out(tmp_path):
    """Events of other programs, without times, with numbers that are none, with lists where objects belong."""
    odd = [
        {"ph": "X", "cat": "v8", "name": "gc", "ts": 1, "dur": 1},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm"},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": "later", "dur": 1},
        {"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 5, "dur": -1, "args": [1]},
        {"ph": "X", "cat": "Operator", "name": "aten::mul", "ts": 7, "dur": 2, "args": {"Input dims": "?"}},
        {"ph": "i", "name": "mark"},
        7,
    ]
    found = read_trace(write(tmp_path / "odd.json", odd))
    assert found.size_kept == 2 and found.other["v8"] == 1
    assert "has no shapes" in str(explain_trace(found, ceilings()))


def test_a_large_trace_is_read_in_little_memory(tmp_path):
    """Some ten megabytes of events leave far less behind, and are never held as text."""
    path = tmp_path / "large.json"
    filler = "x" * 300
    with path.open("w") as file:
        file.write('{"traceEvents": [')
        for number in range(15_000):
            file.write(json.dumps(event("cpu_op", "aten::add", 10.0 * number, 5, Stack=filler)) + ",\n")
        file.write(json.dumps(event("cpu_op", "aten::add", 0, 5)) + "]}")
    shares = []
    tracemalloc.start()
    found = read_trace(path, shares.append)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.size_kept == 15_001 and len(found.keys) == 1
    assert peak < 4 * PIECE + 100 * found.size_kept + 4_000_000 < path.stat().st_size * 2 and kept < peak
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1.0)


def test_the_commands(gpu_trace, tmp_path):
    figures = tmp_path / "out.json"
    done = run_here("explain", "trace", str(gpu_trace), "--preset", "h200", "--json", str(figures))
    assert done.returncode == 0 and "synchronisation" in done.stdout and "100.0%" in done.stdout
    assert json.loads(figures.read_text())["findings"][0]["kind"] == "sync"
    assert "cannot be read" in run_here("explain", "trace", str(tmp_path / "none"), "--preset", "h200").stderr
    script = tmp_path / "script.py"
    script.write_text("import sys, torch\nx = torch.ones(200, 200)\nfor _ in range(int(sys.argv[1])):\n    x @ x\n")
    done = run_here("explain", "run", "--preset", "cpu-8-cores", "--", "python", str(script), "9")
    assert done.returncode == 0 and "aten::mm" in done.stdout
    script.write_text("raise KeyError('x')")
    failed = run_here("explain", "run", "--preset", "cpu-8-cores", "--", "python", str(script))
    assert failed.returncode == 2 and "KeyError" in failed.stderr
    assert "give a script" in run_here("explain", "run", "--", "python").stderr
    assert (
        "--trace is not an option of transect explain run"
        in run_here("explain", "run", "--trace", "t", "--", "python", "x").stderr
    )


@pytest.mark.prove
def test_torchs_own_log_stays_out_of_what_a_program_says(tmp_path):
    """In a process of its own: who profiles first sets how much torch logs for good."""
    script = tmp_path / "script.py"
    script.write_text("import torch\ntorch.ones(2) + 1\n")
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    command = [
        sys.executable,
        "-m",
        "transect",
        "explain",
        "run",
        "--preset",
        "cpu-8-cores",
        "--",
        "python",
        str(script),
    ]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "profiler_start" not in done.stderr


def test_values_that_make_no_sense_stop_nothing(tmp_path):
    """What other programs write, or a disk left: times without bounds, lists for names, shapes that are none."""
    dims = {"Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"]}
    odd, flat = (
        {"Input Dims": [[-1, True], "x"], "Input type": 7},
        {"Input Dims": [[], []], "Input type": ["float"] * 2},
    )
    short = {"Input Dims": [[1, 2, 3, 4], [1], [1]], "Input type": ["float"] * 3}
    names = ("aten::embedding", "aten::mkldnn_convolution", "aten::bmm", "aten::addmm")
    good = [event("cpu_op", "aten::mm", 100.0 * number, 60, **dims) for number in range(20)]
    bad = [
        event("cpu_op", "aten::mm", float("inf"), 5),
        event("cpu_op", "aten::mm", 100, float("inf")),
        event("cpu_op", "aten::mm", 10**400, 5),
        event("cpu_op", ["a", "list"], 2100, 5, tid={"a": []}, **{"External id": 1e30, "Sequence number": 1e300}),
        event("cpu_op", "lone \ud800 surrogate\x1b[31m\n", 2200, 5, **odd),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 2300, 5, bytes=[1]),
        {"ph": "X", "cat": ["x"], "name": None, "ts": 1, "dur": 1, "args": [3]},
        *(event("cpu_op", name, 2400 + 10 * i, 5, **flat) for i, name in enumerate(names)),
        event("cpu_op", "aten::_scaled_dot_product_flash", 2500, 5, **short),
    ]
    path = tmp_path / "odd.json"
    path.write_text(json.dumps({"traceEvents": [*good, *bad]}))
    found = explain_trace(read_trace(path), ceilings())
    assert sum(found.split.parts.values()) == pytest.approx(found.split.wall) and found.split.wall < 3e-3
    mine = next(op for op in found.split.ops if op.key.name == "aten::mm" and op.key.shapes)
    assert mine.calls == 20
    assert "\x1b" not in str(found) and str(found).encode() and page(found).encode()


def loop(tmp_path, cpu_events, kernels=True, kind="cpu_op", steps=20, length=10_000):
    """Steps of 10 ms, each with these events and then a product of 100 us."""
    events = []
    for number in range(steps):
        begin = float(length) * number
        events += [event(kind, name, begin + at, lasting) for name, at, lasting in cpu_events]
        mm = launched("aten::mm", [[64, 64], [64, 64]], ["float", "float"], begin + length - 200, 100, number + 1)
        events += mm if kernels else mm[:1]
    return explain_trace(read_trace(write(tmp_path / "loop.json", events)), preset("h200").ceilings())


LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("loading", [30, 6000])
def test_a_loader_has_only_its_own_part_of_a_gap(tmp_path, kernels, loading):
    """The rest of the gap, in which Python computes before the step, is Python's."""
    parts = loop(tmp_path, [(LOADER, 0, loading)], kernels, "user_annotation").split.parts
    assert parts["loading"] == pytest.approx(19 * loading * 1e-6)  # the trace begins with an operator
    assert parts["host"] + parts["unexplained"] >= 0.9 * 19 * (9700 - loading) * 1e-6


def test_calling_what_was_compiled_is_no_compilation(tmp_path):
    """Every call looks its graph up; compiled code calls operators of inductor's."""
    calls = [("TorchDynamo Cache Lookup", 0, 400), ("inductor::_alloc_from_pool", 500, 300)]
    for kernels in (True, False):
        found = loop(tmp_path, calls, kernels)
        assert not found.split.parts["recompilation"], str(found)
        assert all(each.kind != "recompilation" for each in found.findings)


def test_python_of_compiled_code_is_no_compiler():
    """Files of dynamo's and inductor's stand in the stack of every call."""
    site = f"{sysconfig.get_paths()['purelib']}/torch"
    running = [
        Frame("/tmp/torchinductor_me/ab/cab.py", "call", 12),
        Frame(f"{site}/_inductor/output_code.py", "__call__", 600),
        Frame(f"{site}/_dynamo/eval_frame.py", "_fn", 700),
        Frame("train.py", "step", 3),
    ]
    doing = doing_of(tuple(running))
    assert doing.part == "launch" and doing.frame == running[-1]
    compiling = [Frame(f"{site}/_inductor/graph.py", "run", 9), Frame(f"{site}/_inductor/compile_fx.py", "inner", 5)]
    assert doing_of((*compiling, *running[2:])).part == "recompilation"


def test_a_graphs_kernels_are_no_operators(tmp_path):
    """What a CUDA graph replays was launched by no operator; the numbers of its launches are not those of operators."""
    events = launched("aten::mm", [[4096, 4096], [4096, 4096]], ["float", "float"], 0, 50, 5)
    events.append(event("cuda_runtime", "cudaGraphLaunch", 100, 20, correlation=5))
    events += [event("kernel", "replayed", 200 + 60 * number, 50, tid=7, correlation=5) for number in range(4)]
    found = explain_trace(read_trace(write(tmp_path / "graph.json", events)), preset("h200").ceilings())
    assert found.split.parts["unrated"] == pytest.approx(200e-6)
    assert {op.operator for op in found.split.ops if op.key.name == "replayed"} == {""}


def test_the_main_thread_is_not_the_one_of_the_backward_pass(tmp_path):
    """Autograd's thread nests its operators deeper, and so has more of their time."""
    events = launched("aten::mm", [[64, 64], [64, 64]], ["float", "float"], 0, 50, 1)
    for name in ("autograd::engine::evaluate_function: MmBackward0", "MmBackward0", "aten::mm"):
        events.append(event("cpu_op", name, 100, 300, tid=2))
    trace = read_trace(write(tmp_path / "threads.json", events))
    main = next(int(trace.lane[i]) for i in range(len(trace.ts)) if trace.key_of(i).shapes)
    assert explain_trace(trace, preset("h200").ceilings()).split.lane == main


def test_pythons_own_functions_are_read_in_one_pass(tmp_path):
    """A trace with_stack has more of them than operators."""
    steps = 2000
    events = [event("python_function", "train.py(3): step", 0, 1000.0 * steps)]
    for number in range(steps):
        events += [event("cpu_op", "aten::neg", 1000.0 * number, 10)]
        events += [event("python_function", "prepare.py(7): tokenize", 1000.0 * number + 100, 800)]
    found = explain_trace(read_trace(write(tmp_path / "stack.json", events)), ceilings())
    named = {str(each.doing.frame): each.seconds for each in found.named}
    assert named["tokenize (prepare.py:7)"] == pytest.approx(0.8e-3 * steps, rel=0.01)
    assert named["step (train.py:3)"] == pytest.approx(0.19e-3 * steps, rel=0.01)
