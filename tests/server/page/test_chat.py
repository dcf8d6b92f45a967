"""The chat in a real browser: answers, versions, branches, comparisons, and what a server's end looks like."""

import json

import pytest
from accessible import check_accessible
from page_engine import PageEngine, PageServer
from page_scripts import MARKDOWN, SCRIPTS

SECRET = "a secret key"


def texts(page):
    """The texts of the shown answers, as the models wrote them."""
    return page.evaluate("[...document.querySelectorAll('chat-answer')].map((each) => each.message.answer.text)")


def answers(page):
    return page.evaluate("[...document.querySelectorAll('chat-answer')].map((each) => each.message.answer)")


def wait_until_kept(page, text):
    """Wait until the browser has written an answer that begins with this text, which happens after it is shown."""
    page.wait_for_function(
        """text => new Promise((done) => {
          const opening = indexedDB.open('transect')
          opening.onsuccess = () => {
            const database = opening.result
            const reading = database.transaction('conversations').objectStore('conversations').getAll()
            reading.onsuccess = () => {
              database.close()
              const messages = reading.result.flatMap((each) => Object.values(each.messages))
              done(messages.some((each) => each.answer?.text.startsWith(text)))
            }
          }
        })""",
        arg=text,
    )


def choose(page, at, *, drawn=True):
    """Go to a token with the keys, and continue from it with the token that was drawn, or the first other one."""
    for key in ["Home"] + ["ArrowRight"] * (at + 1) + ["ArrowLeft", "ArrowDown"]:
        page.keyboard.press(key)
    while ("drawn" in page.locator(".candidate.selected").inner_text()) != drawn:
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")


def show_tokens(answer):
    answer.get_by_label("Tokens and their probabilities").click()
    view = answer.locator("token-view .tokens")
    view.focus()
    return view


def test_first_chat(page, ask, server):
    answer = ask(page, "explain recursion")
    assert texts(page) == [MARKDOWN]
    assert answer.locator("pre code .code-keyword").first.inner_text() == "def"
    assert answer.locator("math").count() == 2 and answer.locator("math msup").count() == 1
    assert answer.locator("table tr").count() == 4
    assert "265 tokens" in answer.locator(".figures").inner_text()
    assert server.engine.prompts[-1] == "[user]explain recursion[answer]"
    ask(page, "And more?")
    assert server.engine.prompts[-1] == f"[user]explain recursion[assistant]{MARKDOWN}[user]And more?[answer]"
    before = texts(page)
    wait_until_kept(page, before[1])
    page.reload()
    page.locator("chat-answer").nth(1).wait_for()
    assert texts(page) == before
    page.get_by_label("Delete explain recursion").focus()
    page.once("dialog", lambda dialog: dialog.accept())
    page.keyboard.press("Enter")
    page.get_by_text("Ask the model something").wait_for()
    page.reload()
    page.get_by_text("Ask the model something").wait_for()
    assert page.locator("chat-list li").count() == 0


def test_an_answer_can_be_stopped(page, ask, server):
    answer = ask(page, "wait here", wait=False)
    answer.get_by_text("The story").wait_for()
    page.keyboard.press("Escape")
    answer.get_by_text("Stopped").wait_for()
    page.wait_for_function("() => !document.querySelector('[aria-label=Stop]')")
    server.until(lambda: server.engine.aborted)
    assert not server.engine.running
    assert len(answers(page)[0]["tokenIds"]) == 5


def test_a_message_is_edited_and_an_answer_asked_again(page, ask, server):
    ask(page, "Tell me of rivers")
    first = texts(page)
    page.get_by_label("Ask again").click()
    page.get_by_text("2 / 2").wait_for()
    page.locator("chat-answer .answer-footer").wait_for()
    second = texts(page)
    assert first != second  # another seed
    page.get_by_label("Earlier answer").click()
    assert texts(page) == first
    page.locator(".user").hover()
    page.get_by_label("Edit the message").click()
    page.get_by_label("Edit the message").fill("Tell me of roads")
    page.keyboard.press("Enter")
    page.locator("user-message").get_by_text("2 / 2").wait_for()
    page.locator("chat-answer .answer-footer").wait_for()
    assert server.engine.prompts[-1] == "[user]Tell me of roads[answer]"
    page.get_by_label("Earlier version").click()
    assert page.locator(".user-text").inner_text() == "Tell me of rivers" and texts(page) == first


def test_with_the_keys_a_branch_of_the_same_token_gives_the_same_rest(page, ask, server):
    answer = ask(page, "Tell me of rivers")
    (whole,) = answers(page)
    show_tokens(answer)
    choose(page, 6)
    page.get_by_text("Continued from token 7 of another answer").wait_for()
    page.locator("chat-answer .answer-footer").wait_for()
    (again,) = answers(page)
    assert again["text"] == whole["text"] and again["tokenIds"] == whole["tokenIds"]
    assert again["tokens"] == whole["tokens"]
    show_tokens(page.locator("chat-answer"))
    choose(page, 3, drawn=False)
    page.get_by_text("3 / 3").wait_for()
    page.locator("chat-answer .answer-footer").wait_for()
    (other,) = answers(page)
    assert other["tokenIds"][:3] == whole["tokenIds"][:3] and other["tokenIds"][3] != whole["tokenIds"][3]
    assert other["tokenIds"][3] in [each["id"] for each in whole["tokens"][3]["top"]]
    assert other["text"] != whole["text"]


def test_thoughts_are_folded_and_json_is_shown_as_such(page, ask):
    answer = ask(page, "think of a greeting")
    thoughts = answer.locator("details.thoughts")
    assert thoughts.locator("summary").inner_text() == "Thoughts" and not thoughts.get_attribute("open")
    assert answer.locator(".answer-text").inner_text().strip() == "Hello there."
    thoughts.locator("summary").click()
    assert thoughts.locator("em").inner_text() == "Short"
    answer = ask(page, "json please")
    assert '  "born": 1815,' in answer.locator("figure.code pre").inner_text()


def test_a_call_is_shown_and_answered(page, ask, server):
    tools = json.dumps([{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}])
    page.get_by_role("button", name="Settings").click()
    page.get_by_text("JSON and tools").click()
    page.get_by_label("Tools, as a JSON list").fill(tools)
    page.get_by_label("Message", exact=True).focus()
    answer = ask(page, "weather in Oslo?")
    call = answer.locator("tool-call")
    assert (
        call.locator("h4").first.inner_text().split() == ["Call", "weather"]
        and '"city": "Oslo"' in call.locator("pre").inner_text()
    )
    call.get_by_label("Result of the call").fill('{"degrees": 4}')
    call.get_by_role("button", name="Send the result").click()
    page.locator("chat-answer").nth(1).locator(".answer-footer").wait_for()
    assert '[tool]{"degrees": 4}[answer]' in server.engine.prompts[-1]


def test_several_answers_side_by_side(page, ask, server):
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Answers at once").fill("3")
    ask(page, "Tell me of rivers")
    page.locator("compare-view").wait_for()
    found = answers(page)
    assert len(found) == 3 and len({each["text"] for each in found}) == 3
    assert server.engine.params[-1].n == 3
    page.get_by_text("The conversation goes on with this one").nth(2).click()
    show_tokens(page.locator("chat-answer").nth(2))  # a branch of the third choice is as exact as one of the first
    choose(page, 5)
    page.get_by_text("Continued from token 6").wait_for()
    page.locator("chat-answer .answer-footer").wait_for()
    assert texts(page) == [found[2]["text"]]


def test_settings_have_the_models_defaults_and_are_sent(page, ask, server):
    page.get_by_role("button", name="Settings").click()
    temperature = page.locator("input[name=temperature]")
    assert temperature.get_attribute("placeholder") == "0.7 (the model's)"
    ask(page, "Hello")
    assert server.engine.params[-1].temperature == 0.7 and server.engine.params[-1].top_p == 0.9
    temperature.fill("1.25")
    page.locator("input[name=max_tokens]").fill("4")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Message", exact=True).focus()
    answer = ask(page, "Hello")
    params = server.engine.params[-1]
    assert params.temperature == 1.25 and params.max_tokens == 4 and params.top_p == 0.9
    assert server.engine.prompts[-1].startswith("[system]Be brief.[user]Hello[assistant]")
    assert answer.get_by_text("Cut: the answer has all the tokens").count() == 1


def test_two_settings_and_a_second_server_are_compared(page, ask):
    other = PageServer(PageEngine(SCRIPTS), model_names=("other-model",), api_keys=(SECRET,))
    try:
        page.get_by_role("button", name="Compare").click()
        dialog = page.get_by_role("dialog")
        second = dialog.locator("fieldset").nth(1)
        second.get_by_label("Name").fill("the other")
        second.get_by_label("Another server's address").fill(other.url)
        page.keyboard.press("Tab")
        second.get_by_label("Its key").fill(SECRET)
        page.keyboard.press("Tab")
        second.get_by_role("option", name="other-model").wait_for(state="attached")
        dialog.get_by_role("button", name="Compare", exact=True).click()
        ask(page, "Tell me of rivers")
        table = page.locator("compare-view")
        table.wait_for()
        assert [each.get("model") for each in answers(page)] == ["made-up", "other-model"]
        assert other.engine.params[-1].temperature == 0.0  # the settings of its lane
        table.get_by_role("button", name="Difference of log-probabilities").click()
        table.get_by_text("Log-probability by the other").wait_for()
        table.get_by_text("-1.500").first.wait_for()
        table.get_by_text("(+0.000)").nth(1).wait_for()
    finally:
        other.stop()


def test_two_adapters_are_compared(new_page, ask, tmp_path):
    for name in ("poet", "clerk"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
        (tmp_path / name / "adapter_model.safetensors").write_text(name)
    server = PageServer(PageEngine(SCRIPTS), allowed_lora_dir=str(tmp_path))
    try:
        page = new_page(server.url)
        page.get_by_role("button", name="Compare").click()
        dialog = page.get_by_role("dialog")
        for number, name in enumerate(("poet", "clerk")):
            lane = dialog.locator("fieldset").nth(number)
            lane.get_by_label("Name").fill(f"the {name}")
            lane.get_by_label("Model").select_option(name)
        dialog.get_by_role("button", name="Compare", exact=True).click()
        ask(page, "adapter who are you?")
        page.locator("compare-view").wait_for()
        assert sorted(server.engine.adapters) == ["clerk", "poet"]
        assert [(each["model"], each["text"]) for each in answers(page)] == [
            ("poet", "This is poet speaking."), ("clerk", "This is clerk speaking."),
        ]  # fmt: skip
        assert len({each["body"]["seed"] for each in answers(page)}) == 1
        page.get_by_role("button", name="Difference of log-probabilities").click()
        page.get_by_text("(+0.000)").nth(1).wait_for()
    finally:
        server.stop()


def test_a_searchs_tree_grows_beside_its_answer(page, ask, server, monkeypatch):
    """Branches, votes and the winner are drawn while they run, and read with the keys and as a list."""
    page.get_by_role("button", name="Settings").click()
    page.get_by_text("Search: more compute").click()
    form = page.locator("chat-settings")
    offered = form.locator("[name=search] option").all_inner_texts()
    assert {"majority", "beam", "best of n"} <= set(offered)
    form.locator("[name=search]").select_option("majority")
    form.locator("[name=search-n]").fill("6")
    form.locator("[name=search-extract]").select_option("number")
    monkeypatch.setattr(server.engine, "step_s", 0.1)
    ask(page, "vote on it", wait=False)
    page.wait_for_function(
        "() => document.querySelector('search-tree')?.search.branches.some((each) => each.tokens > 1)"
    )
    state = page.evaluate("document.querySelector('search-tree').search")
    assert len(state["branches"]) == 6 and state["chosen"] is None
    assert page.locator("search-tree .alive").count() > 3
    page.locator("search-tree .check").wait_for()
    assert texts(page)[0].endswith("is 4") and server.engine.params[-1].n == 6
    found = page.evaluate("document.querySelector('search-tree').search")
    assert found["votes"]["4"] >= 3 and found["endedBy"] == "method"
    assert any(each["state"] == "dropped" for each in found["branches"])  # the vote was decided before
    assert page.locator("search-tree .cross").count() == page.locator("search-tree .dropped").count() > 0
    tree = page.locator("search-tree .drawing")
    tree.press("Home")
    assert page.locator("search-tree .readout").inner_text().startswith("Branch 0, the answer: ended")
    assert "votes for 4" in page.locator("search-tree .readout").inner_text()
    tree.press("ArrowDown")
    page.get_by_text("Branches as a list").click()
    rows = page.get_by_role("region", name="Branches of the search").locator("tbody tr").all_inner_texts()
    assert len(rows) == 6 and "won" in rows[0]
    check_accessible(page, "a search's tree")
    page.reload()
    page.locator("search-tree .check").wait_for()  # the browser keeps it


HELD_STORE = """
const getAll = IDBObjectStore.prototype.getAll
IDBObjectStore.prototype.getAll = function (...given) {
  const real = getAll.apply(this, given), held = {}
  real.onsuccess = () => { window.release = () => { held.result = real.result; held.onsuccess() } }
  return held
}
"""


def test_a_chat_that_began_before_the_kept_ones_are_read_stays_in_the_list(page, ask):
    page.add_init_script(HELD_STORE)
    page.reload()
    ask(page, "Hello")
    page.wait_for_function("Boolean(window.release)")
    page.evaluate("window.release()")
    page.wait_for_timeout(100)
    assert page.get_by_role("link", name="Hello").count() == 1
    assert page.get_by_role("button", name="Export").is_enabled()


def test_conversations_are_exported_and_imported(page, ask, new_page, server, tmp_path):
    ask(page, "explain recursion")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    path = tmp_path / "chats.json"
    download.value.save_as(path)
    assert json.loads(path.read_text())["format"] == "transect.conversations.1"
    fresh = new_page(server.url)
    fresh.locator("input.import").set_input_files(path)
    fresh.get_by_role("link", name="explain recursion").click()
    fresh.locator("chat-answer table").wait_for()
    assert answers(fresh) == answers(page)
    path.write_text('{"format": "of another program"}')
    fresh.locator("input.import").set_input_files(path)
    fresh.get_by_text("This file has no conversations of this page").wait_for()


def test_a_wrong_key_and_the_right_one(new_page, ask):
    closed = PageServer(PageEngine(), api_keys=(SECRET,))
    try:
        page = new_page(closed.url)
        dialog = page.get_by_role("dialog")
        for key in ("wrong", SECRET):
            dialog.get_by_role("alert").wait_for()
            dialog.get_by_label("Key", exact=True).fill(key)
            page.keyboard.press("Enter")
        page.get_by_role("heading", name="made-up").wait_for()
        ask(page, "Hello")
        assert page.evaluate("Object.values(localStorage).join()").find(SECRET) < 0  # it was not asked for
        page.reload()
        dialog.get_by_label("Key", exact=True).fill(SECRET)
        dialog.get_by_label("Remember it in this browser").check()
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="made-up").wait_for()
        page.reload()
        page.get_by_role("heading", name="made-up").wait_for()
    finally:
        closed.stop()


def test_a_restarted_server_is_told_and_tried_again(new_page, ask):
    server = PageServer(PageEngine(SCRIPTS))
    try:
        page = new_page(server.url)
        page.get_by_role("heading", name="made-up").wait_for()
        answer = ask(page, "wait for it", wait=False)
        answer.get_by_text("The story").wait_for()
        server.stop()
        answer.get_by_text("The connection broke off in the middle of the answer").wait_for()
        failed = ask(page, "Hello", wait=False)
        failed.get_by_text("The server does not answer").wait_for()
        page.get_by_text("This page tries again every").wait_for()
        server.start(server.port)
        page.get_by_text("The server is back.").wait_for()
        page.get_by_role("button", name="Try again").last.click()
        page.locator("chat-answer").last.get_by_text("25 tokens").wait_for()
        assert page.get_by_text("The server does not answer").count() == 0
    finally:
        server.stop()


def test_another_replica_that_goes_on_leaves_a_mark_alone(page, ask):
    answer = ask(page, "continued by another")
    assert texts(page) == [SCRIPTS["continued"]]
    assert "went on from token 6" in answer.locator(".mark.continued").inner_text()
    answer = ask(page, "die now")
    assert "the engine has stopped" in answer.locator(".failure").inner_text()


def test_without_a_mouse(page):
    """Tab to the tokens of an answer and back, by keys alone."""
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.type("Hello")
    page.keyboard.press("Enter")
    page.locator(".answer-footer").wait_for()
    for _ in range(6):
        page.keyboard.press("Shift+Tab")
        if page.evaluate("document.activeElement.ariaLabel") == "Tokens and their probabilities":
            break
    page.keyboard.press("Enter")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("ArrowRight")
    assert "token 2 of 25" in page.locator(".token-panel").inner_text()
    assert page.locator(".tokens").get_attribute("aria-activedescendant").endswith("-1")
    page.keyboard.press("Escape")
    assert page.locator(".token-panel").count() == 0
    page.keyboard.press("Alt+2")
    page.wait_for_function("() => document.title.startsWith('Engine')")


@pytest.mark.parametrize("width", [360, pytest.param(700, marks=pytest.mark.prove)])
def test_a_phone(new_page, server, ask, width):
    page = new_page(server.url, viewport={"width": width, "height": 700}, has_touch=True)
    ask(page, "explain recursion")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.get_by_role("button", name="Conversations").click()
    page.get_by_role("link", name="explain recursion").wait_for()
    page.get_by_role("button", name="New chat").click()
    page.get_by_text("Ask the model something").wait_for()
