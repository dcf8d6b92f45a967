"""Check a page of a browser with axe, whose rules find many accessibility errors."""

import pytest

RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}


def check_accessible(page, what):
    """Fail if axe finds an error in the page as it is shown now; ``what``: its name in the failure."""
    axe = pytest.importorskip("axe_playwright_python.base", reason="pip install axe-playwright-python")
    page.evaluate(axe.AXE_SCRIPT)
    found = page.evaluate("(rules) => axe.run(document, rules)", RULES)
    told = [(each["id"], each["help"], [node["html"][:200] for node in each["nodes"]]) for each in found["violations"]]
    assert not told, f"{what}: {told}"
