"""Detection of training data in typical files, broken ones among them.

    python benchmarks/train/data_formats.py

Writes the files into a temporary folder, looks at each as ``transect data check`` does, and keeps what was found in
benchmarks/results/cpu/data_formats.json.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record

sys.path.insert(0, str(record.ROOT / "examples" / "pretrain"))

TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
ROWS = 8


def lines(rows: Sequence[Any]) -> bytes:
    """Format JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def table(rows: Sequence[Mapping[str, Any]], delimiter: str = ",") -> bytes:
    """Format CSV."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


def chat(i: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"{i} + {i}?"}, {"role": "assistant", "content": str(2 * i)}]}


def sharegpt(i: int, who: str = "gpt") -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": f"Say {i}"}, {"from": who, "value": str(i)}]}


def alpaca(i: int) -> dict[str, str]:
    return {"instruction": "Double the number", "input": str(i), "output": f"It is {2 * i},\nof course"}


def pair(i: int) -> dict[str, Any]:
    return {"prompt": f"Is {i} even?", "chosen": "yes" if i % 2 == 0 else "no", "rejected": "maybe"}


def whole_pair(i: int) -> dict[str, Any]:
    asked = chat(i)["messages"][:1]
    return {side: [*asked, {"role": "assistant", "content": side}] for side in ("chosen", "rejected")}


def parquet(path: Path, rows: Sequence[Any]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


def dataset(path: Path, rows: Sequence[Any]) -> None:
    """Write a folder as ``Dataset.save_to_disk`` of Hugging Face ``datasets`` does."""
    import pyarrow

    path.mkdir()
    made = pyarrow.Table.from_pylist(list(rows))
    with (path / "data-00000-of-00001.arrow").open("wb") as file, pyarrow.ipc.new_stream(file, made.schema) as out:
        out.write_table(made)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))


def tool_chat(i: int) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "add", "arguments": json.dumps({"a": i})}}
    messages = [
        {"role": "user", "content": f"Add {i}"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": str(i)},
        {"role": "assistant", "content": f"It is {i}."},
    ]
    return {"messages": messages, "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}]}


MANY = range(ROWS)
CHATS, ALPACAS = [chat(i) for i in MANY], [alpaca(i) for i in MANY]
FILES: dict[str, bytes | Callable[[Path], None]] = {
    "chats.jsonl": lines(CHATS),
    "CHATS.JSONL": lines(CHATS),
    "chats.ndjson.gz": gzip.compress(lines(CHATS)),
    "chats.parquet": lambda path: parquet(path, CHATS),
    "chats_dataset": lambda path: dataset(path, CHATS),
    "tools.jsonl": lines([tool_chat(i) for i in MANY]),
    "sharegpt.json": json.dumps([sharegpt(i) for i in MANY]).encode(),
    "alpaca.json": json.dumps(ALPACAS).encode(),
    "alpaca.csv": b"\xef\xbb\xbf" + table(ALPACAS).replace(b"\n", b"\r\n"),
    "wrapped.json": json.dumps({"version": 1, "data": ALPACAS}).encode(),
    "questions.tsv": table([{"question": f"{i}?", "answer": str(i)} for i in MANY], "\t"),
    "completions.jsonl": lines([{"prompt": f"{i}, ", "completion": f"{i + 1}"} for i in MANY]),
    "preferences.jsonl": lines([pair(i) for i in MANY]),
    "preferences.parquet": lambda path: parquet(path, [whole_pair(i) for i in MANY]),
    "judged.jsonl": lines([{"prompt": f"{i}?", "completion": "yes", "label": i % 2 == 0} for i in MANY]),
    "documents.jsonl": lines([{"text": f"Document {i}.", "source": "web"} for i in MANY]),
    "book.md": b"# A book\n\nIt was late.\n",
    "a_line_cut_off.jsonl": lines(CHATS)[:-20],
    "typing_errors.jsonl": lines([{"mesages": row["messages"]} if i == 3 else row for i, row in enumerate(CHATS)]),
    "nobody_answers.jsonl": lines([{"messages": row["messages"][: 1 + (i > 1)]} for i, row in enumerate(CHATS)]),
    "strange_roles.jsonl": lines([sharegpt(i, "gtp" if i == 5 else "gpt") for i in MANY]),
    "two_layouts.jsonl": lines([alpaca(i) if i == 4 else chat(i) for i in MANY]),
    "uneven.csv": table(ALPACAS) + b"only one field\n",
    "latin1.txt": "Größe".encode("latin-1"),
    "cut_off.jsonl.gz": gzip.compress(lines(CHATS))[:-30],
    "several_lists.json": json.dumps({"train": ALPACAS, "test": ALPACAS}).encode(),
    "empty.jsonl": b"",
    "notes.docx": b"PK\x03\x04",
    "not.parquet": b"PAR1 no more",
}  # fmt: skip


def main() -> None:
    from byte_model import Shape, write_model

    from transect.text.chat_template import ChatTemplate
    from transect.text.tokenizer import Tokenizer
    from transect.train.data.checks import check_files

    found = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_model(folder / "shape", Shape(dim=64, layers=1, heads=2, ffn=64, context=64))
        tokenizer = Tokenizer.from_hf(folder / "shape")
        for name, content in FILES.items():
            path = folder / ("upper" if name.isupper() else "files") / name
            path.parent.mkdir(exist_ok=True)
            if callable(content):
                content(path)
            else:
                path.write_bytes(content)
            (one,) = check_files([str(path)], tokenizer, ChatTemplate(TEMPLATE))
            problems = [problem.replace(f"{path.parent}/", "") for problem in one.problems]
            found.append({"file": name, "layout": one.layout, "trained": one.trained, "rows": one.rows,
                          "tokens": one.tokens, "problems": problems})  # fmt: skip
            print(found[-1])
    result = {"command": "python benchmarks/train/data_formats.py", "files": found, "environment": record.environment()}
    record.write(record.RESULTS / "cpu" / "data_formats.json", result)


def rendered(result: Mapping[str, Any]) -> str:
    """Format the table for docs/train/training.md."""
    made = ["| file | layout | trained tokens | rows read | refused rows, with reasons |", "|---|---|---|---|---|"]
    for row in result["files"]:
        problems = "<br>".join(problem.replace("|", "\\|") for problem in row["problems"])
        layout = row["layout"] if row["rows"] else ""
        trained = row["trained"] if row["rows"] else ""
        made.append(f"| `{row['file']}` | {layout} | {trained} | {row['rows']} | {problems} |")
    origin = f"`{result['command']}`, {record.made_at([result['environment']])}."
    return "\n".join([*made, "", origin]) + "\n"


if __name__ == "__main__":
    main()
