"""Hostile answers run no script, load nothing and cover nothing; and all can be read, by people and by programs."""

import pytest
from accessible import check_accessible
from page_scripts import HOSTILE, long_text

WITH_HANDLERS = """[...document.querySelectorAll('chat-view *')].filter(
    (each) => Object.values(each.attributes).some(({ name }) => name.startsWith('on')))"""


def test_hostile_answers_run_nothing(page, ask):
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    answer = ask(page, "hostile")
    page.wait_for_timeout(300)  # for whatever would run later
    assert page.evaluate("window.hacked") is None
    home = page.evaluate("location.origin")
    assert [url for url in asked if not url.startswith(home)] == []
    links = answer.locator("a").evaluate_all("(all) => all.map((each) => each.getAttribute('href'))")
    assert links and all(link.startswith("http://127.0.0.1:9/") for link in links)  # the picture became a link
    inside = answer.locator(".answer-text")
    for tag in ("script", "iframe", "img", "svg", "form", "style", "object"):
        assert inside.locator(tag).count() == 0, tag
    assert page.evaluate(f"{WITH_HANDLERS}.length") == 0
    assert inside.locator("[style]:not(math *):not(math)").count() == 0
    assert "<script>window.hacked = 1</script>" in inside.inner_text()  # it is text
    assert inside.locator("figure.code pre").inner_text().startswith("<script>window.hacked = 10")
    assert inside.locator("[dir=auto]").count() > 3
    assert page.evaluate("document.querySelector('chat-answer').message.answer.text") == HOSTILE
    box = page.locator("chat-composer").bounding_box()
    assert abs(box["y"] + box["height"] - 860) < 1  # nothing pushed the rest away
    page.get_by_label("Tokens and their probabilities").click()
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("window.hacked") is None


def test_hostile_names_and_files_run_nothing(page, ask, tmp_path):
    ask(page, "<img src=x onerror=window.hacked=1> <b>bold</b>")
    assert page.locator("chat-list img, .user-text img, .user-text b").count() == 0
    assert page.evaluate("window.hacked") is None


def test_the_policy_lets_no_inline_script_run(page):
    page.evaluate("""() => {
        const script = document.createElement('script')
        script.textContent = 'window.hacked = 1'
        document.body.append(script)
        const div = document.createElement('div')
        div.innerHTML = '<img src="x" onerror="window.hacked = 2">'
        document.body.append(div)
    }""")
    page.wait_for_timeout(100)
    assert page.evaluate("window.hacked") is None


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.prove)])
def test_axe_finds_no_error(new_page, server, ask, scheme):
    page = new_page(server.url, color_scheme=scheme, reduced_motion="reduce")
    page.get_by_role("heading", name="made-up").wait_for()
    check_accessible(page, "the beginning")
    ask(page, "explain recursion")
    ask(page, "think of a greeting")
    page.get_by_label("Tokens and their probabilities").last.click()
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    page.get_by_role("button", name="Settings").click()
    check_accessible(page, "an answer, its tokens and the settings")
    page.get_by_role("button", name="Compare").click()
    check_accessible(page, "the dialog of comparisons")
    page.get_by_role("dialog").get_by_role("button", name="Compare", exact=True).click()
    ask(page, "Tell me of rivers")
    page.locator("compare-view").wait_for()
    page.get_by_role("button", name="API key").click()
    check_accessible(page, "a comparison and the dialog of keys")


def test_a_long_answer_grows_without_being_made_anew(page, ask, server, monkeypatch):
    """Rendered blocks stay: the first ones are the same nodes at the end as at the beginning."""
    monkeypatch.setattr(server.engine, "step_s", 0.001)  # else a quick machine has the answer in one frame
    server.engine.scripts["grow"] = long_text(1500)
    page.evaluate("""() => {
        window.renders = 0
        const observer = new MutationObserver(() => {
            const blocks = document.querySelector('.answer-text .blocks')
            if (!blocks?.childElementCount) return
            window.first ??= blocks.firstElementChild
            window.renders++
        })
        observer.observe(document.body, { childList: true, subtree: true })
    }""")
    answer = ask(page, "grow")
    assert page.evaluate("window.renders") > 3
    assert page.evaluate("window.first === document.querySelector('.answer-text .blocks').firstElementChild")
    count = answer.locator(".answer-text .blocks > *").count()
    assert count == long_text(1500).count("## A part") * 4  # heading, paragraph, list, code
    whole = page.evaluate("document.querySelector('.answer-text').innerText")
    page.reload()
    page.locator("chat-answer h4").first.wait_for()
    assert page.evaluate("document.querySelector('.answer-text').innerText") == whole  # as if rendered at once
