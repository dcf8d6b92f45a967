"""Make the pictures of docs/serve/page.md: ``python tests/helpers/page_pictures.py docs/images``.

The chat, its tokens, a search and a comparison are of the built-in model, which runs for this.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SIZE = {"width": 1160, "height": 720}
LARGEST = 150_000
"""Bytes of a picture."""


@contextmanager
def model_server(*options: str) -> Iterator[str]:
    """Run ``transect serve`` with the built-in model; yields its address."""
    command = [sys.executable, "-m", "transect", "serve", "smollm2-135m", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield process.stdout.readline().split(" ready on ")[1].split()[0]
    finally:
        process.terminate()
        process.wait(30)


def ask(page: Any, text: str, count: int) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    page.locator(".answer-footer").nth(count - 1).wait_for(timeout=120_000)
    page.wait_for_timeout(200)


def configure(page: Any, **fields: str) -> None:
    page.get_by_role("button", name="Settings", exact=True).click()
    page.locator("chat-settings details").evaluate_all("(all) => all.forEach((each) => { each.open = true })")
    for name, value in fields.items():
        page.locator(f"[name={name}]").fill(value)
    page.get_by_role("button", name="Settings", exact=True).click()


def make(browser: Any, url: str, folder: Path) -> list[Path]:
    """Write the pictures to a folder; returns their paths."""
    pictures = []

    def take(page: Any, name: str) -> None:
        pictures.append(folder / f"page-{name}.png")
        page.evaluate("document.activeElement?.matches('textarea') && document.activeElement.blur()")
        page.screenshot(path=pictures[-1])
        page.close()

    def opened(**options: Any) -> Any:
        page = browser.new_page(**{"viewport": SIZE} | options)
        page.goto(url)
        page.get_by_role("heading", name="smollm2-135m").wait_for()
        return page

    page = opened()
    configure(page, seed="7", temperature="0.2", max_tokens="220")
    ask(page, "Write a short Python function that returns the factorial of n, and explain it.", 1)
    take(page, "chat")

    page = opened(color_scheme="dark")
    configure(page, seed="5", max_tokens="90")
    ask(page, "Why is the sky blue?", 1)
    page.get_by_label("Tokens and their probabilities").click()
    page.locator(".tokens").focus()
    for key in ["ArrowRight"] * 11 + ["ArrowDown"] * 2:
        page.keyboard.press(key)
    page.locator(".token-panel").wait_for()
    take(page, "tokens")

    page = opened()
    configure(page, seed="4", max_tokens="24", temperature="0.8")
    page.get_by_role("button", name="Settings", exact=True).click()
    page.locator("[name=search]").select_option("majority")
    page.locator("[name=search-n]").fill("12")
    page.get_by_role("button", name="Settings", exact=True).click()
    ask(page, "What is 3 + 4? Answer with a number.", 1)
    page.locator("search-tree .check").wait_for()
    page.locator("search-tree .drawing").press("Home")
    take(page, "search")

    page = opened(viewport={"width": 1160, "height": 960})
    configure(page, seed="3", max_tokens="70")
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("dialog").get_by_role("button", name="Compare", exact=True).click()
    ask(page, "Describe the sea in two sentences.", 2)
    page.get_by_role("button", name="Bills").click()
    page.get_by_role("button", name="Difference of log-probabilities").click()
    page.get_by_text("means over the answer").wait_for()
    page.get_by_role("button", name="Difference of log-probabilities").wait_for()
    page.wait_for_timeout(300)
    page.evaluate("document.querySelector('.thread').scrollTop = 1e6")
    take(page, "compare")
    return pictures


def main() -> None:
    from playwright.sync_api import sync_playwright

    with model_server() as url, sync_playwright() as program:
        browser = program.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for path in make(browser, url, Path(sys.argv[1])):
            print(path, path.stat().st_size)
        browser.close()


if __name__ == "__main__":
    main()
