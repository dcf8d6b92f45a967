"""The load test of a server and the timeline of its steps, as far as no server is needed."""

import json
import sys
from array import array
from pathlib import Path

import pytest

from transect.engine.decisions import Added, Done, Header, Planned, _framed
from transect.text.tokenizer import Tokenizer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import serve_load
    import step_timeline

    yield serve_load, step_timeline
    for name in ("serve_load", "step_timeline", "record"):
        sys.modules.pop(name, None)


def test_every_token_of_the_made_up_vocabulary_is_a_word(modules, tmp_path):
    serve_load, _ = modules
    shape = tmp_path / "shape"
    shape.mkdir()
    (shape / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300}))
    tokenizer = Tokenizer.from_hf(serve_load.model_folder(str(shape), tmp_path / "model"))
    ids = [5, 299, 0, 17, 17, 120]
    text = serve_load.text(tuple(ids))
    assert list(tokenizer.encode(text)) == ids
    assert tokenizer.decode(ids) == text and all(tokenizer.decode([each]).strip() for each in ids)


def rows(*each):
    return array("I", [number for row in each for number in row]).tobytes()


def test_parts_of_a_gap_add_up_and_name_its_cause(modules, tmp_path):
    """Step 2 ends 30 ms after step 1 because step 3 was launched for 25 of them; two sequences waited."""
    _, step_timeline = modules
    decode = rows((1, 10, 1), (2, 20, 1))
    records = [
        Header(1, {}, 1, 0.0),
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
    found = step_timeline.timeline(log)
    assert found["causes"]["gaps"] == {"launch": 1} and found["p99"] == pytest.approx(0.030)
    assert step_timeline.timeline(log, begin=1.0) == {}
