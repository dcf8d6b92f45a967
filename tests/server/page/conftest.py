"""A real browser, the system's Chromium, and servers with a made-up engine."""

import shutil

import pytest
from page_engine import PageEngine, PageServer
from page_scripts import SCRIPTS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser():
    """Ends with its module: while it is there, no test of this process can run an event loop of its own."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as program:
        options = ["--no-sandbox", "--disable-gpu"]  # else a process of its own draws on the processor, as for a GPU
        browser = program.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server():
    """The page's server, whose model can think and call tools."""
    server = PageServer(PageEngine(SCRIPTS), reasoning_parser="qwen3")
    yield server
    server.stop()


@pytest.fixture
def new_page(browser):
    """Opens pages with a browser's memory of their own. A test fails where a page reports an error."""
    contexts, errors = [], []

    def opened(url, **options):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}} | options)
        context.set_default_timeout(120_000)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert errors == []


@pytest.fixture
def page(new_page, server):
    return new_page(server.url)


@pytest.fixture
def ask():
    """Sends a message and waits for the end of its answer: the answer's element."""

    def asking(page, text, wait=True):
        count = page.locator("chat-answer").count()
        page.get_by_label("Message", exact=True).fill(text)
        page.keyboard.press("Enter")
        answer = page.locator("chat-answer").nth(count)
        if wait:
            answer.locator(".answer-footer").wait_for()
        return answer

    return asking
