"""The page and the rooflines: whole, self-contained, and drawn by a browser where there is one."""

import html.parser
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree

import pytest
from commands import run_here
from planted_faults import ceilings

from transect.costs.presets import PRESETS, preset
from transect.explain.program.explain import explain_trace
from transect.explain.program.report_html import page
from transect.explain.program.trace_file import read_trace
from transect.explain.roofline import points_of_model, points_of_operator, roofline
from transect.explain.roofline_svg import svg, text
from transect.spec.shapes import PRESETS as SHAPES

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

HOSTILE = "<!--<script></script><b onclick='x'>"


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """A trace with a name that would break out of a script element."""
    mm = {"Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"]}
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 100 * n, "dur": 60, "pid": 1, "tid": 1, "args": mm}
        for n in range(20)
    ]
    events.append({"ph": "X", "cat": "cpu_op", "name": HOSTILE, "ts": 2100, "dur": 50, "pid": 1, "tid": 1})
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


class Reader(html.parser.HTMLParser):
    """Collects elements, what they load, and the JSON."""

    def __init__(self):
        super().__init__()
        self.loads, self.ids, self.figures, self._in = [], set(), "", ""

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.loads += [value for name, value in attributes if name in ("src", "href", "action", "data", "srcset")]
        self.ids.add(named.get("id"))
        self._in = named.get("id", "") if tag == "script" else ""

    def handle_endtag(self, tag):
        self._in = ""

    def handle_data(self, data):
        if self._in == "figures":
            self.figures += data


def test_the_page_is_whole_and_loads_nothing(trace):
    found = explain_trace(read_trace(trace), ceilings())
    reader = Reader()
    reader.feed(page(found))
    assert not reader.loads
    assert {"bar", "parts", "findings", "timeline", "operators", "roofline", "figures"} <= reader.ids
    figures = json.loads(reader.figures)
    assert sum(figures["parts_s"].values()) == pytest.approx(figures["wall_s"])
    assert HOSTILE in figures["timeline"]["names"]
    # "<!--" and "<script" would make a browser take the element's own end for text.
    assert "<" not in reader.figures and page(found).count("<script") == page(found).count("</script>") == 2
    assert sum(map(len, figures["timeline"]["lanes"].values())) == 21
    assert 'name="viewport"' in page(found) and "prefers-color-scheme: dark" in page(found)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page(found))


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed (chromium)")
def test_a_browser_draws_it(trace, tmp_path):
    file = tmp_path / "page.html"
    done = run_here("explain", "trace", str(trace), "--preset", "cpu-8-cores", "--html", str(file))
    assert done.returncode == 0
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile", "--dump-dom"]
    seen = subprocess.run([BROWSER, *options, file.as_uri()], capture_output=True, text=True, timeout=200)
    assert 'data-drawn="1"' in seen.stdout, seen.stderr[-500:]


def test_points_of_a_model_lie_under_the_roof():
    """Decode is bound by bytes and prefill by arithmetic; with 4 bits the same work moves fewer bytes."""
    limits = preset("h200").ceilings()
    points = points_of_model(SHAPES["llama-3.1-8b"], limits, batch=1, context=512, prompt=2048)
    found = roofline(limits, points)
    by = {(point.group, point.name): point for point in points}
    linear = [by[f"{step} {stored}", "linear"] for step in ("decode", "prefill") for stored in ("bf16", "4-bit")]
    assert [found.bound(point) for point in linear] == ["bytes", "bytes", "FLOPs", "FLOPs"]
    assert 3 < linear[1].intensity / linear[0].intensity < 4
    for point in points:
        assert point.rate <= limits.rate("bfloat16") * 1.001
        assert point.rate <= point.intensity * limits.read_bytes_per_second * 1.001
    picture = ElementTree.fromstring(svg(found))
    dots = [each for each in picture.iter() if each.tag.endswith("circle") and list(each)]
    assert len(dots) == len(points) and len([e for e in picture.iter() if e.get("class") == "roof"]) == 1
    assert "bound by bytes" in text(found) and "TFLOP/s" in text(found)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_drawn(name):
    limits = PRESETS[name].ceilings()
    found = roofline(limits, points_of_operator("rms_norm", limits))
    assert all(found.bound(point) == "bytes" for point in found.points)
    ElementTree.fromstring(svg(found))


def test_the_command(trace, tmp_path):
    picture, figures = tmp_path / "x.svg", tmp_path / "x.json"
    done = run_here("roofline", "llama-3.1-8b", "--preset", "b200", "--svg", str(picture), "--json", str(figures))
    assert done.returncode == 0 and "NVIDIA B200" in done.stdout
    assert ElementTree.parse(picture) and len(json.loads(figures.read_text())["points"]) > 8
    assert "aten::mm x20" in run_here("roofline", str(trace), "--preset", "cpu-8-cores").stdout
    assert "lower --context" in run_here("roofline", "llama-3.1-8b", "--preset", "l4", "--prompt", "999999").stderr
    assert "no preset" in run_here("roofline", "llama-3.1-8b", "--preset", "y").stderr
