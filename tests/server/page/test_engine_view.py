"""The view of the engine in a real browser, beside the shipping server with engines that make tokens up."""

import os
import time
from pathlib import Path

import pytest
from accessible import check_accessible
from PIL import Image
from stub_server import Load, StubServer
from tiny_llm import save_tiny_llm

STREAMS, SEQS, BLOCKS = 32, 24, 640
MODEL = "document.querySelector('engine-view').model"
PICTURES = os.environ.get("TRANSECT_PICTURES")
"""Folder for the pictures of docs; none are kept without it."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llm(folder)
    return folder


@pytest.fixture(scope="module")
def busy(tiny):
    """A server under the load of 32 streams, with places for 24 of them."""
    server = StubServer(tiny, blocks=BLOCKS, seqs=SEQS)
    with Load(server, STREAMS, max_tokens=60):
        yield server
        server.stop()


@pytest.fixture
def engine_page(new_page):
    """Opens the view, and waits for its first steps."""

    def opened(server, **options):
        page = new_page(f"{server.url}/#/engine", **options)
        page.wait_for_function(f"() => {MODEL}?.steps.length > 20")
        return page

    return opened


def model(page, expression):
    return page.evaluate(f"(() => {{ const model = {MODEL}; return {expression} }})()")


def test_a_busy_engine_is_shown_step_by_step(engine_page, busy):
    page = engine_page(busy)
    # Steps from before the page was opened may have rows of requests that had ended by then.
    seen = "model.steps.filter((s) => s.begin > model.state.now)"
    many = f"model.itl.length > 500 && model.ttft.length > 5 && model.waiting.length > 3 && {seen}.length > 20"
    page.wait_for_function(f"() => {{ const model = {MODEL}; return {many} }}")
    steps = model(page, "model.steps.map((each) => [each.number, each.rows.length / 3, each.prefill + each.decode])")
    numbers = [number for number, _, _ in steps]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert max(rows for _, rows, _ in steps) == SEQS and all(tokens >= rows for _, rows, tokens in steps)
    unknown = f"{seen}.flatMap((s) => s.rows.filter((_, i) => i % 3 === 0)).filter((q) => !model.requestOf(q))"
    assert model(page, f"{unknown}.length") == 0
    counts = model(page, "model.blockCounts()")
    assert sum(counts.values()) == BLOCKS and counts["own"] > 0 and counts["shared"] > 0
    parts = model(page, "model.timeParts(10, model.now)")
    assert sum(parts.values()) == pytest.approx(10) and parts["above"] > 0
    waiting = page.get_by_role("region", name="Waiting requests")
    waiting.get_by_text("all places for sequences are taken").first.wait_for()
    waiting.get_by_text("behind the head of the queue").first.wait_for()
    for canvas in ("step-strip canvas", "kv-map canvas"):  # something is drawn
        colors = "new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size"
        assert page.evaluate(f"(() => {{ const c = document.querySelector('{canvas}'); return {colors} }})()") > 8
    page.get_by_text("Steps as a table").click()
    assert page.get_by_role("region", name="The newest steps").locator("tbody tr").count() == 20
    page.get_by_text("Blocks as a table").click()
    assert page.get_by_role("region", name="KV blocks by request").locator("tbody tr").count() > 0


def test_the_bill_of_a_request_grows_beside_it(engine_page, busy):
    page = engine_page(busy)
    running = model(page, "model.open.filter((each) => each.state === 'running').at(-1).id")
    page.locator(".follow select").select_option(running)
    page.wait_for_function(f"() => {MODEL}?.bill?.known")
    first = model(page, "model.bill.until")
    page.wait_for_function(f"() => {MODEL}.bill?.until > {first} || {MODEL}.bill?.finish_reason")
    bill = model(page, "model.bill")
    assert bill["request_id"] == running and running in page.url
    assert sum(bill["ttft"]["parts_ms"].values()) == pytest.approx(bill["ttft"]["ms"])
    page.get_by_text("To the first token").wait_for()


KEEP = f"""(() => {{
    const model = {MODEL}, sight = model.sights.at(-1)
    const step = model.steps.filter((each) => each.end <= sight.at).at(-1)
    const here = ([seq]) => model.requests.get(seq)?.arrival <= step.end
    return {{ step: step.number, owners: [...model.owners], waiting: model.waiting.filter(here).map(([seq]) => seq) }}
}})()"""
"""The newest snapshot, the step before it, and the requests of the snapshot that had arrived when this step ended."""


def test_a_paused_view_is_scrubbed_back_and_asks_for_nothing(engine_page, busy):
    page = engine_page(busy)
    page.wait_for_function(f"() => {MODEL}.sights.length > 2")
    kept = page.evaluate(KEEP)
    page.wait_for_function(f"() => {MODEL}.steps.at(-1).number > {kept['step']} + 40 && {MODEL}.sights.length > 6")
    page.evaluate("document.querySelector('engine-view').seconds = 0.1")
    page.get_by_text("Steps as a table").click()
    strip = page.locator("step-strip .drawing")
    strip.focus()
    page.keyboard.press("Space")
    page.get_by_role("button", name="Resume").wait_for()
    last = model(page, "model.steps.at(-1).number")
    time.sleep(0.4)
    assert model(page, "model.steps.at(-1).number") == last
    assert page.evaluate("document.querySelector('engine-view').reading") is None
    strip.press("ArrowLeft")
    chosen = page.locator("step-strip .readout")
    assert chosen.inner_text().startswith(f"Step {last}:")
    strip.press("ArrowLeft")
    page.get_by_text(f"Step {last - 1}:").wait_for()
    newest = page.get_by_role("region", name="The newest steps").locator("td").first
    assert newest.text_content() == str(last - 1)
    slider = page.get_by_label("Look back")
    index = model(page, f"model.steps.findIndex((each) => each.number === {kept['step']})")
    slider.fill(str(index))
    page.locator(".look-back", has_text=f"step {kept['step']},").wait_for()
    assert newest.text_content() == str(kept["step"])
    shown = page.evaluate("(() => { const { owners } = document.querySelector('kv-map').model; return [...owners] })()")
    assert shown == kept["owners"] != model(page, "[...model.owners]")
    waits = page.get_by_role("region", name="Waiting requests").locator("tbody tr")
    assert waits.count() >= len(kept["waiting"])
    slider.press("ArrowLeft")
    page.locator(".look-back", has_text=f"step {kept['step'] - 1},").wait_for()
    slider.press("Home")
    page.wait_for_function(f"() => {MODEL}.now - document.querySelector('engine-view').read > 0.1")
    blocks = page.locator("kv-map .drawing")
    blocks.focus()
    blocks.press("ArrowRight")
    blocks.press("ArrowDown")
    assert page.locator("kv-map .readout").inner_text().startswith("Block ")
    check_accessible(page, "the paused engine view")
    page.get_by_role("button", name="Resume").click()
    page.wait_for_function(f"() => {MODEL}.steps.at(-1).number > {last}")
    page.get_by_role("link", name="Chat").click()  # another tab of the page ends the watch
    page.wait_for_function("() => document.querySelector('engine-view').reading === null")
    page.get_by_role("link", name="Engine").click()
    page.wait_for_function("() => document.querySelector('engine-view').link === 'live'")


@pytest.mark.prove
def test_the_recent_load_is_replayed_with_other_settings(engine_page, busy):
    page = engine_page(busy)
    page.wait_for_function(f"() => {MODEL}?.steps.length > 100")
    form = page.locator("what-if")
    form.get_by_label("Sequences at once").fill("2")
    form.get_by_label("Others, one a line").fill("no_such_setting=3")
    form.get_by_role("button", name="Replay").click()
    form.get_by_text("no_such_setting: no such setting").wait_for(timeout=120_000)
    form.get_by_label("Others, one a line").fill("")
    form.get_by_role("button", name="Replay").click()
    rows = page.get_by_role("region", name="Prediction").locator("tbody tr")
    rows.first.wait_for(timeout=120_000)
    assert "max_num_seqs = 2" in form.inner_text() and rows.count() == 5
    change = rows.nth(0).locator("td").last.inner_text()
    assert change.startswith("+")  # two places for 32 streams: first tokens wait longer


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"color_scheme": "dark"}, marks=pytest.mark.prove),
        pytest.param({"viewport": {"width": 390, "height": 800}}, marks=pytest.mark.prove),
    ],
    ids=["dark", "phone"],
)
def test_axe_finds_no_error(engine_page, busy, options):
    page = engine_page(busy, **options)
    page.locator(".follow select").select_option(index=1)
    page.get_by_role("button", name="Pause").click()
    check_accessible(page, "the engine view")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.fixture(scope="module")
def guarded(tiny):
    keys = tiny / "keys.jsonl"
    keys.write_text('{"key": "key-of-alice", "name": "alice"}\n{"key": "key-of-bob", "name": "bob"}\n')
    server = StubServer(
        tiny, "--api-key-file", str(keys), "--admin-api-key", "key-of-admin", "--data-parallel-size", "2"
    )
    with Load(server, 6, "key-of-bob", max_tokens=40), Load(server, 2, "key-of-alice", max_tokens=40):
        yield server
        server.stop()


@pytest.mark.prove
def test_a_key_decides_what_is_shown(new_page, guarded):
    page = new_page(f"{guarded.url}/#/engine")

    def give(key):
        page.locator("key-dialog input").first.fill(key)
        page.locator("key-dialog button.main").click()

    page.get_by_role("dialog").wait_for()
    give("a wrong key")
    page.get_by_role("dialog").wait_for()
    assert model(page, "model") is None
    give("key-of-alice")
    page.wait_for_function(f"() => {MODEL}?.steps.length > 5")
    assert {each["client"] for each in model(page, "[...model.requests.values()]")} == {"alice"}
    assert "bob" not in page.locator("engine-view").inner_text() and page.locator("what-if").count() == 0
    page.get_by_text("your own requests only").wait_for()
    page.get_by_role("button", name="API key").click()
    give("key-of-admin")
    page.wait_for_function(
        f"() => new Set([...({MODEL}?.requests.values() ?? [])].map((each) => each.client)).size === 2"
    )
    page.get_by_role("heading", name="Router").wait_for()
    assert page.locator(".offer.won").count() > 0
    page.get_by_label("Replica").select_option("1")
    page.wait_for_function(f"() => {MODEL}?.state.engine === 1 && {MODEL}.steps.length > 0")


@pytest.mark.prove
def test_a_server_that_is_started_again_is_watched_again(new_page, tiny):
    server = StubServer(tiny)
    page = new_page(f"{server.url}/#/engine")
    page.wait_for_function("() => document.querySelector('engine-view').link === 'live'")
    began = model(page, "model.state.now")
    server.stop()
    page.wait_for_function("() => document.querySelector('engine-view').link !== 'live'")
    again = StubServer(tiny, port=server.port)
    try:
        page.wait_for_function(
            f"() => document.querySelector('engine-view').link === 'live' && {MODEL}.state.now > {began}",
            timeout=60_000,
        )
    finally:
        again.stop()


@pytest.mark.prove
def test_the_picture_of_the_docs(new_page, smollm2, tmp_path):
    """The view of a real model under load, as docs show it."""
    limits = ["--max-num-seqs", "12", "--kv-cache-bytes", str(240 * 10**6)]
    server = StubServer(smollm2.path, *limits, program="transect")
    try:
        with Load(server, 8, max_tokens=40), Load(server, 8, tail=900, max_tokens=70):
            page = new_page(f"{server.url}/#/engine", viewport={"width": 1280, "height": 1480})
            page.wait_for_function(f"() => {MODEL}?.steps.length > 60 && {MODEL}.evicted.size >= 0", timeout=60_000)
            page.wait_for_timeout(9000)
            running = model(page, "model.open.find((each) => each.state === 'running').id")
            page.locator(".follow select").select_option(running)
            page.wait_for_function(f"() => {MODEL}?.bill?.decode && {MODEL}.steps.length > 60", timeout=60_000)
            picture = Path(PICTURES or tmp_path) / "engine-view.png"
            page.screenshot(path=picture)
            server.stop()
            with Image.open(picture) as image:
                image.quantize(128).save(picture, optimize=True)
            assert 20_000 < picture.stat().st_size < 150_000
    finally:
        server.stop()
