"""The load test of a server and the timeline of its steps, as far as no server is needed."""

import json
import sys
from array import array
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripted_server import answer

from benchmarks.server import chats, generators, load, long_among_short, request_stages, step_timeline
from transect.bench.levels import run_levels
from transect.bench.load import Record
from transect.bench.target import Target
from transect.engine.scheduling.decisions import FORMAT, Added, Done, Header, Planned, _framed
from transect.text.tokenizer import Tokenizer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def modules():
    return SimpleNamespace(
        serve_load=load,
        step_timeline=step_timeline,
        load_chats=chats,
        load_generators=generators,
        load_long=long_among_short,
        request_stages=request_stages,
    )


def test_every_token_of_the_made_up_vocabulary_is_a_word(modules, tmp_path):
    shape = tmp_path / "shape"
    shape.mkdir()
    (shape / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300}))
    tokenizer = Tokenizer.from_hf(modules.serve_load.model_folder(str(shape), tmp_path / "model"))
    ids = [5, 299, 0, 17, 17, 120]
    text = modules.load_generators.text(tuple(ids))
    assert list(tokenizer.encode(text)) == ids
    assert tokenizer.decode(ids) == text and all(tokenizer.decode([each]).strip() for each in ids)


def rows(*each):
    return array("I", [number for row in each for number in row]).tobytes()


def test_parts_of_a_gap_add_up_and_name_its_cause(modules, tmp_path):
    """Step 2 ends 30 ms after step 1 because step 3 was launched for 25 of them; two sequences waited."""
    step_timeline = modules.step_timeline
    decode = rows((1, 10, 1), (2, 20, 1))
    records = [
        Header(FORMAT, {}, 1, 0.0),
        Added(0.0, "a", 1, 10, 1, 9, 0, 0.0, False, False),
        Planned(1, 0.000, 0.001, decode, 0, "", 0, 2, 9),
        Planned(2, 0.002, 0.003, None, 0, "", 0, 2, 9),
        Done(1, 0.004, 0.010, 0.011, learned=0.009),
        Planned(3, 0.012, 0.013, rows((1, 12, 1), (2, 22, 1), (3, 0, 300)), 0, "", 0, 3, 9),
        Done(2, 0.038, 0.040, 0.041, learned=0.030),
    ]
    log = tmp_path / "log"
    log.write_bytes(b"".join(map(_framed, records)))
    (gap,) = list(step_timeline.gaps(step_timeline.load(log)))
    assert gap.seconds == pytest.approx(0.030) == pytest.approx(sum(gap.parts.values()))
    assert gap.cause == "launch" and gap.parts["launch"] == pytest.approx(0.025)
    assert (gap.decodes, gap.prompt_tokens, gap.launched) == (2, 0, (302, 300))
    assert gap.predicted == pytest.approx(0.009, rel=0.01)
    found = step_timeline.timeline(step_timeline.load(log))
    assert found["causes"]["gaps"] == {"launch": 1} and found["p99"] == pytest.approx(0.030)
    step = {"mixed": False, "tokens": 2, "steps": 1, "learned": 0.030, "decodes": 2, "keys": 34, "pairs": 0}
    assert found["sizes"] == [pytest.approx(step)]
    assert step_timeline.timeline(step_timeline.load(log), begin=1.0) == {}


def test_the_stages_of_a_request_add_up_to_its_first_token(modules, tmp_path):
    """A request sent at 1.002 (due at 1.0) is in the engine at 1.010, and its prompt takes two steps. Another one of
    the same length comes behind it, and one of another length."""
    records = [
        Header(FORMAT, {}, 1, 0.0),
        Added(1.010, "a", 1, 300, 1, 9, 0, 1.009, False, False),
        Added(1.011, "b", 2, 40, 1, 9, 0, 1.010, False, False),
        Planned(1, 1.015, 1.016, rows((1, 0, 200)), 0, "", 0, 2, 9),
        Done(1, 1.016, 1.030, 1.031),
        Added(1.031, "c", 3, 300, 1, 9, 0, 1.030, False, False),
        Planned(2, 1.032, 1.033, rows((1, 200, 100), (2, 0, 40)), 0, "", 0, 2, 9),
        Done(2, 1.034, 1.050, 1.051),
        Planned(3, 1.052, 1.053, rows((3, 0, 300)), 0, "", 0, 2, 9),
        Done(3, 1.054, 1.070, 1.071),
    ]
    path = tmp_path / "log"
    path.write_bytes(b"".join(map(_framed, records)))
    log = modules.step_timeline.load(path)
    sent = [
        Record(due=0.0, sent=0.002, moments=[0.053, 0.060], ended=0.06, input_tokens=300, output_tokens=2),
        Record(due=0.02, sent=0.021, moments=[0.075], ended=0.075, input_tokens=300, output_tokens=1),
        Record(due=0.0, sent=0.003, moments=[0.054], ended=0.06, input_tokens=40, output_tokens=1),
        Record(due=0.0, sent=0.003, error="timeout"),
    ]
    stages = modules.request_stages
    pairs = stages.matched(log, sent, 1.0)
    assert {life.added.request_id: record.due for record, life in pairs} == {"a": 0.0, "b": 0.0, "c": 0.02}
    found = stages.request_stages(log, sent[:1], 1.0)
    means = {name: found[name]["mean"] for name in stages.STAGES}
    assert sum(means.values()) == pytest.approx(found["ttft"]["mean"]) == pytest.approx(0.053)
    expected = {"late": 2, "to the engine": 8, "to a plan": 5, "to the device": 1, "prompt": 34, "to the client": 3}
    assert {name: value * 1e3 for name, value in means.items()} == pytest.approx(expected)
    assert found["steps"]["p50"] == 2


def test_the_generator_of_others_is_asked_for_the_same_work(modules, tmp_path, monkeypatch, capsys):
    """The script exists, its options are the ones it knows, and its figures come out in seconds."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("raise ImportError('needs a GPU')")
    from benchmarks.peers import sglang_generator as generators

    with monkeypatch.context() as without, pytest.raises(ValueError, match=r"pip install --no-deps sglang"):
        without.setattr(generators.importlib.util, "find_spec", lambda name: None)
        generators.sglang_script()
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "sglang" / "bench_serving.py").write_text(
        "import json, sys\n"
        "given = dict(zip(sys.argv[2::2], sys.argv[3::2]))\n"
        "assert sys.argv[1] == '--disable-tqdm' and given['--request-rate'] == 'inf', sys.argv\n"
        "low = float(given['--random-range-ratio']) * float(given['--random-input-len'])\n"
        "times = {f'{how}_{what}_ms': 40.0 for how in ('mean', 'median', 'p99') for what in "
        "('ttft', 'tpot', 'itl', 'e2e_latency')}\n"
        "more = {'completed': 3, 'duration': 2.0, 'total_input_tokens': low, 'total_output_tokens': 9}\n"
        "figures = times | more | {'output_throughput': 4.5, 'concurrency': 1.0}\n"
        "figures['groups'] = given.get('--gsp-num-groups')\n"
        "open(given['--output-file'], 'a').write(json.dumps(figures))\n"
    )

    async def name(url):
        return "model"

    monkeypatch.setattr(generators, "served_model", name)
    from benchmarks.peers import sglang_driver

    monkeypatch.setattr(sglang_driver, "LIBRARIES", ())
    lines = StringIO()
    for prefixes in (False, True):
        out = tmp_path / f"figures {prefixes}"
        command = generators.sglang_command("http://localhost:1", tmp_path, float("inf"), 3, 0, out, prefixes=prefixes)
        print(json.dumps(command), file=lines)
    lines.seek(0)
    monkeypatch.setattr(sys, "stdin", lines)
    monkeypatch.setattr(sys, "argv", [])
    sglang_driver.main()
    said = [line for line in capsys.readouterr().out.splitlines() if line]
    assert said == [f'{sglang_driver.DONE}""'] * 2
    assert json.loads((tmp_path / "figures True").read_text())["groups"] == "4"
    found = generators.sglang_summary(json.loads((tmp_path / "figures False").read_text()), 3)
    assert found["ttft"] == {"mean": 0.04, "p50": 0.04, "p99": 0.04} and found["input_tokens"] == 240
    assert modules.serve_load.figures(found) == pytest.approx([4.5] + [40.0] * 7)


def test_seeds_of_a_rate_are_one_row_and_their_worst(modules):
    def level(rate, seed, ms, tokens):
        times = {"p50": ms / 1e3, "p99": 2 * ms / 1e3}
        result = {"output_tokens_per_second": tokens, **dict.fromkeys(("ttft", "tpot", "itl", "e2e"), times)}
        return {"rate": rate, "seed": seed, "result": result}

    levels = [level("24", 0, 30, 100), level("24", 1, 10, 300), level("24", 2, 20, 200), level("8", 0, 5, 50)]
    lines = modules.serve_load.table({"levels": levels}).splitlines()[2:]
    assert lines[0].startswith("| 8 | Transect | 50 | 5.00 | 10.00 |")
    assert lines[2].startswith("| 24 | Transect, median of 3 | 200 | 20.00 | 40.00 |")
    assert lines[3].startswith("| 24 | worst of these | 100 | 30.00 | 60.00 |")


def test_results_of_several_runs_become_one_that_names_their_commits(modules, tmp_path, monkeypatch, capsys):
    def result(commit, *levels):
        machine = {"packages": {"torch": "9"}, "version": "99.0.0", "commit": commit}
        times = {name: {"p50": 0.01, "p99": 0.02} for name in ("ttft", "tpot", "itl", "e2e")}
        counts = {"step_seconds": 1.0, "predicted_step_seconds": 1.0}
        timeline = {"p99": 0.01, "causes": {"shares": dict.fromkeys(modules.serve_load.CAUSES, 0.2)}}
        each = {"result": times | {"output_tokens_per_second": 9.0, "counters": counts}, "timeline": timeline}
        found = [{"rate": rate, "seed": seed} | each for rate, seed in levels]
        work = {"kind": "random", "requests": 4}
        known = {"command": "c", "shape": "s", "options": [], "generator": "g", "work": work, "ready_s": 1.0}
        return known | {"environment": machine, "levels": found}

    files = []
    for name, found in (("a", result("aaaa", ("8", 0), ("inf", 0))), ("b", result("bbbb", ("8", 1), ("inf", 0)))):
        files.append(tmp_path / name)
        files[-1].write_text(json.dumps(found))
    out = tmp_path / "whole.json"
    monkeypatch.setattr(sys, "argv", ["serve_load.py", "--merge", *map(str, files), "--out", str(out)])
    modules.serve_load.main()
    whole = json.loads(out.read_text())
    assert [(each["rate"], each["seed"], each["commit"]) for each in whole["levels"]] == [
        ("8", 0, "aaaa"),
        ("8", 1, "bbbb"),
        ("inf", 0, "bbbb"),
    ]
    assert "commit aaaa, bbbb" in modules.serve_load.page(whole)
    assert "| 8 | Transect, median of 2 |" in capsys.readouterr().out
    with pytest.raises(ValueError, match="differ in their shape"):
        modules.serve_load.merged([whole, whole | {"shape": "t"}])


async def test_a_chat_sends_back_what_it_was_answered(modules, server, monkeypatch):
    """Three turns; the answers to the other chat fail at once, and end it."""
    load_chats = modules.load_chats
    monkeypatch.setattr(load_chats, "PAUSE_S", 0.01)
    server.script = lambda body: (
        [b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n"] if "x" in body["prompt"] else answer(2)
    )
    chat = load_chats.Chat(0.02, ((" a", 2), (" b", 2), (" c", 2)))
    target = Target(server.url, "m", timeout_s=20.0)
    run = await load_chats.run_chats(target, [chat, load_chats.Chat(0.0, ((" x", 2), (" y", 2)))])
    said = [body["prompt"] for body in server.bodies if "x" not in body["prompt"]]
    assert said == [" a", " a 0 1 b", " a 0 1 b 0 1 c"]
    assert [record.error for record in run.records] == [None, None, None, "http 500"]
    assert all(after.due >= before.ended + 0.01 for before, after in pairwise(run.records[:3]))
    held = load_chats.chats(12, 4.0, 0, [" u", " v"])
    assert [len(each.turns) for each in held] == [5, 5, 5] and held == load_chats.chats(12, 4.0, 0, [" u", " v"])


def test_other_work_has_its_own_generator_and_one_server(modules, monkeypatch, capsys, tmp_path):
    asked = []
    monkeypatch.setattr(modules.serve_load, "measure", lambda options, results: asked.append(results))
    for work in ("prefixes,chats", "chats"):
        monkeypatch.setattr(sys, "argv", ["serve_load.py", "--work", work, "--out", str(tmp_path / "a.json")])
        modules.serve_load.main()
    both, alone = asked
    assert [(result["generator"], out.name) for result, out in both.values()] == [
        ("sglang.bench_serving", "a_prefixes.json"),
        ("transect bench serve", "a_chats.json"),
    ]
    assert alone["chats"][1].name == "a.json"
    assert alone["chats"][0]["command"] == "python benchmarks/server/load.py --work chats"
    for work in ("random,chats", "poems"):
        monkeypatch.setattr(sys, "argv", ["serve_load.py", "--work", work])
        with pytest.raises(SystemExit):
            modules.serve_load.main()
        assert "share a server with a prefix cache" in capsys.readouterr().err
    short = modules.load_generators.own_level(8.0, 5, 0, 299, (1, 1))
    assert [each.prompt.count(" ") for each in short.work] == [1] * 5


def test_a_vocabulary_is_asked_for_once(modules):
    from benchmarks.peers import sglang_driver

    class Tokenizer:
        asked = 0

        def get_vocab(self):
            self.asked += 1
            return {"a": self.asked}

    sglang_driver.keep_vocabulary(Tokenizer)
    one, other = Tokenizer(), Tokenizer()
    assert [one.get_vocab() for _ in range(3)] == [{"a": 1}] * 3 and other.get_vocab() == {"a": 1}
    assert one.asked == 1


async def test_figures_with_long_prompts_among_short_ones_are_those_of_the_short(modules, server, monkeypatch):
    long, generators = modules.load_long, modules.load_generators
    monkeypatch.setattr(long, "EVERY_S", 0.05)
    monkeypatch.setattr(long, "LONG", 300)
    level = generators.own_level(60.0, 9, 0, 299, (20, 40))
    mixed = long.with_long(level, 0, [" a", " b"])
    count = len(mixed.work) - 9
    assert count == int(level.work[-1].at / 0.05) > 0 and mixed.work == sorted(mixed.work, key=lambda each: each.at)
    assert [each for each in mixed.work if each in level.work] == level.work
    server.script = lambda body: answer(4, body["prompt"].count(" "))
    (result,) = await run_levels(Target(server.url, "m", timeout_s=20.0), [mixed])
    found = long.of_short(result)
    assert (result.summary["requests"], found.summary["requests"], len(found.records)) == (9 + count, 9, 9)
    assert found.summary["input_tokens"] == sum(each.prompt.count(" ") for each in level.work)
    assert found.summary["long_ttft"]["p50"] > 0
