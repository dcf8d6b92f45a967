"""Answers of the made-up engine (``page_engine``), by the first word of the message."""

MARKDOWN = '''Recursion means that a function **calls itself** on a smaller part, until the part is so small
that the answer is plain.

```python
def factorial(n: int) -> int:
    """Multiply the whole numbers from 1 to n."""
    if n < 2:        # small enough: the answer is plain
        return 1
    return n * factorial(n - 1)
```

The number of calls grows with $n$, and the result follows *Stirling's formula*:

$$n! \\approx \\sqrt{2 \\pi n} \\left(\\frac{n}{e}\\right)^n$$

| n | calls | n! |
|---|------:|---:|
| 1 | 1 | 1 |
| 5 | 5 | 120 |
| 10 | 10 | 3,628,800 |

1. Find the **plain case**.
2. Make the part *smaller*.
3. Trust the call.

> A loop does the same, and needs no stack. It costs \\$0 more, or $5 less.
'''

HOSTILE = """<script>window.hacked = 1</script>
<img src=x onerror="window.hacked = 2">

[a link](javascript:window.hacked=3) and <a href="javascript:window.hacked=4">another</a>
[data](data:text/html,<script>window.hacked=5</script>)

![picture](http://127.0.0.1:9/spy.png "x")

<svg onload="window.hacked=6"></svg><iframe srcdoc="<script>parent.hacked=7</script>"></iframe>
<math><mtext></form><form><mglyph><style></math><img src onerror=window.hacked=8>

$\\href{javascript:window.hacked=9}{x}$ $\\htmlStyle{position:fixed}{y}$ $\\def\\a{\\a\\a}\\a$

<style>body { display: none }</style> <div style="position:fixed;inset:0;background:red">over all</div>

مرحبا بالعالم — this line has two directions: \u202eevil\u202c

"""
HOSTILE += "|" + " x |" * 60 + "\n|" + "---|" * 60 + "\n" + ("|" + " y |" * 60 + "\n") * 20
HOSTILE += "\n" + "> " * 200 + "deep\n\n" + "- " * 100 + "deep\n\n" + "*" * 3000 + "\n\n" + "[" * 2000 + "\n\n"
HOSTILE += "```html\n<script>window.hacked = 10</script>\nhalf open code"

THOUGHTS = "<think>\nThe user wants a greeting. *Short* is best.\n</think>\n\nHello there."
CALL = 'I look that up.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
WAITS = "The story of a long wait has no end, and so it is told in few words."
JSON = '{"name": "Ada", "born": 1815, "fields": ["mathematics", "computing"]}'


def long_text(tokens: int) -> str:
    """Make a text of about that many tokens with paragraphs, lists and code."""
    paragraph = (
        "A long answer goes on and on, with words that fill the page line by line, and nobody reads all of it. " * 3
    )
    items = "".join(f"{number}. item number {number} of a list\n" for number in range(1, 9))
    code = "```python\nfor number in range(10):\n    print(number, number ** 2)\n```\n"
    unit = f"## A part\n\n{paragraph}\n\n{items}\n{code}\n"
    return unit * (1 + tokens // 150)


BEFORE = ["It", "So it", "The whole of it", "I say that it", "If one counts well then the sum of them", "At last it"]
SCRIPTS = {
    "explain": MARKDOWN,
    "hostile": HOSTILE,
    "think": THOUGHTS,
    "weather": CALL,
    "json": JSON,
    "long": long_text(10_000),
    "wait": WAITS,
    "vote": [f"{before} is {vote}" for before, vote in zip(BEFORE, "445474", strict=True)],
    "die": WAITS,
    "continued": "One replica of the model began this answer, another one went on with it, and no word was lost.",
}
