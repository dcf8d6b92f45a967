"""lm-evaluation-harness: local-completions (log-likelihoods of echoed prompts) and local-chat-completions.

The task is a file made here: four questions with two answers each. The tokenizer is the server's own, by its
``/tokenizer_info`` and ``/tokenize``.
"""

import json
import os
import tempfile
from pathlib import Path

FOLDER = Path(tempfile.mkdtemp())
os.environ |= {"HF_DATASETS_CACHE": str(FOLDER / "datasets"), "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}

import lm_eval  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from outcomes import BASE, MODEL, check, feature, main  # noqa: E402

PAIRS = [
    "The capital of France is|Paris|under",
    "One, two, three,|four|apple",
    "Monday, Tuesday,|Wednesday|bicycle",
    "The opposite of hot is|cold|quickly",
]
rows = [dict(zip(("question", "right", "wrong"), pair.split("|"), strict=True)) for pair in PAIRS]
(FOLDER / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
HEAD = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{test: {FOLDER / "rows.jsonl"}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
(FOLDER / "choose.yaml").write_text(
    f"task: choose{HEAD}output_type: multiple_choice\ndoc_to_target: 0\n"
    'doc_to_choice: "{{[right, wrong]}}"\nmetric_list: [{metric: acc}]\n'
)
(FOLDER / "answer.yaml").write_text(
    f'task: answer{HEAD}output_type: generate_until\ndoc_to_target: "{{{{right}}}}"\n'
    "generation_kwargs: {until: ['\\n'], max_gen_toks: 8}\nmetric_list: [{metric: exact_match}]\n"
)


def evaluate(kind, route, task, **more):
    arguments = {"model": MODEL, "base_url": f"{BASE}/{route}", "num_concurrent": 4, "max_length": 2048, **more}
    found = lm_eval.simple_evaluate(
        model=kind,
        model_args=arguments,
        tasks=[task],
        task_manager=TaskManager(include_path=str(FOLDER), include_defaults=False),
        apply_chat_template=kind == "local-chat-completions",
        bootstrap_iters=0,
    )
    return found["results"][task]


@feature("text completions")
def loglikelihood():
    tokens = {"tokenizer_backend": "remote"}
    found = evaluate("local-completions", "completions", "choose", **tokens)
    check(found["acc,none"] == 1.0, found)
    generated = evaluate("local-completions", "completions", "answer", **tokens)
    check("exact_match,none" in generated, generated)
    return f"log-likelihoods, accuracy {found['acc,none']:.2f}"


@feature("chat")
def chat():
    found = evaluate("local-chat-completions", "chat/completions", "answer")
    check("exact_match,none" in found, found)


main()
