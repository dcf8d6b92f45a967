"""Measure the frames of the page while an answer of 10,000 tokens arrives, and while the reader scrolls through it.

    python benchmarks/server/page_frames.py [--tokens 10000] [--rounds 3] [--out FILE]

The engine is ``tests/helpers/page_engine.py``, which makes up tokens at a steady pace, each with five alternatives; the
browser is the system's Chromium without a window, whose frames take 16.7 ms where nothing delays them. A frame's time
is the distance of two calls of requestAnimationFrame. Writes benchmarks/results/cpu/page_frames.json.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import _paths
from benchmarks import record

sys.path.insert(0, str(_paths.ROOT / "tests" / "helpers"))
from page_engine import PageEngine, PageServer
from page_scripts import long_text

STEP_S = 0.002
LATE_MS = 50.0
"""A frame that takes longer than this can be seen."""
WATCH = """() => {
    window.frames_ms = []
    let before = performance.now()
    const frame = (now) => {
        window.frames_ms.push(now - before)
        before = now
        window.watching = requestAnimationFrame(frame)
    }
    window.watching = requestAnimationFrame(frame)
}"""
TAKE = "() => { cancelAnimationFrame(window.watching); return window.frames_ms.slice(1) }"
SCROLL = """async () => {
    const thread = document.querySelector('.thread')
    thread.scrollTop = 0
    while (thread.scrollTop + thread.clientHeight < thread.scrollHeight - 2) {
        thread.scrollTop += 60
        await new Promise(requestAnimationFrame)
    }
}"""


def described(frames: list[float]) -> dict[str, float]:
    """Describe frame times in milliseconds."""
    ordered = sorted(frames)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return {
        "frames": len(frames),
        "median_ms": statistics.median(frames),
        "p95_ms": at(0.95),
        "p99_ms": at(0.99),
        "longest_ms": ordered[-1],
        "late_share": sum(each > LATE_MS for each in frames) / len(frames),
    }


def measure(browser: Any, server: PageServer, tokens: int) -> dict[str, dict[str, float]]:
    """Ask for one long answer in a new page."""
    page = browser.new_page(viewport={"width": 1280, "height": 860})
    page.goto(server.url)
    page.get_by_role("heading", name="made-up").wait_for()
    found = {}
    page.evaluate(WATCH)
    page.wait_for_timeout(2000)
    found["idle"] = described(page.evaluate(TAKE))
    page.evaluate(WATCH)
    page.get_by_label("Message", exact=True).fill("long")
    page.keyboard.press("Enter")
    page.locator(".answer-footer").wait_for(timeout=300_000)
    found["arriving"] = described(page.evaluate(TAKE))
    page.evaluate(WATCH)
    page.evaluate(SCROLL)
    found["scrolling"] = described(page.evaluate(TAKE))
    assert page.evaluate("document.querySelector('chat-answer').message.answer.tokenIds.length") >= tokens
    page.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=10_000, help="least tokens of the answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "page_frames.json")
    arguments = parser.parse_args()
    from playwright.sync_api import sync_playwright

    server = PageServer(PageEngine({"long": long_text(arguments.tokens)}, STEP_S))
    try:
        with sync_playwright() as program:
            browser = program.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            rounds = [measure(browser, server, arguments.tokens) for _ in range(arguments.rounds)]
            version = browser.version
            browser.close()
    finally:
        server.stop()
    record.write(
        arguments.out,
        {
            **record.environment(),
            "command": record.command("benchmarks/server/page_frames.py"),
            "chromium": version,
            "tokens": arguments.tokens,
            "step_s": STEP_S,
            "rounds": rounds,
        },
    )
    for name in rounds[0]:
        for figure in ("median_ms", "p99_ms", "longest_ms", "late_share"):
            print(name, figure, *(f"{each[name][figure]:.3f}" for each in rounds))


if __name__ == "__main__":
    main()
