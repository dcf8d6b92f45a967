"""Every recipe runs as it stands, but for a tiny model and two steps; its data are what ``make_data.py`` writes."""

import json
import sys
from pathlib import Path

import pytest
from commands import run_here
from tiny_llm import save_tiny_llm

from transect.text.chat_template import ChatTemplate
from transect.train.config import TrainConfig
from transect.train.objectives.rewards import Judge

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
sys.path.insert(0, str(ROOT / "recipes"))

import make_data  # noqa: E402

TINY = {"micro_batch": 2048, "seq_len": 1024}  # bytes are its tokens
TINY_GRPO = {"prompts": 2, "group": 2, "max_tokens": 4}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llm(folder, max_position_embeddings=2048, intermediate_size=128)
    return folder


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains_measures_and_leaves_a_model(recipe: Path, tiny: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    config = TrainConfig.from_toml(recipe)
    changes = {"model": str(tiny), "run_dir": str(tmp_path / "run"), "steps": 2, "device": "cpu", "eval_every": 0}
    changes |= {f"data.{key}": value for key, value in TINY.items()}
    changes |= {"lora.rank": 2, "lora.group": 32, "schedule.warmup": 0, "schedule.decay": 0}
    if config.objective == "grpo":
        changes |= {f"grpo.{key}": value for key, value in TINY_GRPO.items()}
    if config.objective == "distill":
        changes["distill.teacher"] = str(tiny)
    settings = [part for key, value in changes.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    done = run_here("train", str(recipe.relative_to(ROOT)), *settings)
    assert done.returncode == 0, done.stderr
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in log] == ["step", "step", "evaluation"]
    last = tmp_path / "run" / "last"
    assert (last / "model.safetensors").is_file() or any(last.glob("*.safetensors"))
    if config.data.chat_template not in ("auto", "model"):
        assert (last / "chat_template.jinja").read_text() == (ROOT / config.data.chat_template).read_text()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_names_its_own_command_and_files_that_exist(recipe: Path) -> None:
    text = recipe.read_text()
    assert f"#   transect train recipes/{recipe.name}\n" in text
    config = TrainConfig.from_toml(recipe)
    assert config.data.train and config.data.validation and config.steps >= 40
    for name in (*config.data.train, *config.data.validation):
        assert (ROOT / name).is_file()


def test_there_is_a_recipe_for_each_kind_of_training() -> None:
    names = {recipe.stem for recipe in RECIPES}
    wanted = {"sft", "lora", "qlora", "dpo", "grpo", "continued-pretraining", "distillation", "tool-use"}
    assert names == wanted


def test_the_data_files_are_what_their_program_writes(tmp_path: Path) -> None:
    make_data.write(tmp_path)
    there = ROOT / "recipes" / "data"
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in there.iterdir()}
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (there / file.name).read_bytes(), f"run python recipes/make_data.py: {file.name}"


def test_the_verifiers_say_what_an_answer_is_worth() -> None:
    judge = Judge([f"{ROOT}/recipes/verifiers.py:correct", f"{ROOT}/recipes/verifiers.py:alone"], [])
    said = {answer: judge(answer, {"answer": "12"}) for answer in ("12", " 12\n", "5 + 7 = 12", "12 or 13", "twelve")}
    assert said["12"] == said[" 12\n"] == [1, 1]
    assert said["5 + 7 = 12"] == [1, 0]
    assert said["12 or 13"] == [0, 0]
    assert said["twelve"][0] == 0 and said["twelve"][1] != said["twelve"][1]  # nothing to say


def test_the_template_of_tools_writes_calls_as_the_server_reads_them() -> None:
    template = ChatTemplate((ROOT / "recipes" / "tools.jinja").read_text(), "", "")
    row = next(iter(make_data.tool_chats()))
    text = template.render(row["messages"], add_generation_prompt=False, tools=row["tools"])
    name = row["messages"][1]["tool_calls"][0]["function"]["name"]
    call = text.split("<tool_call>\n")[2].split("\n</tool_call>")[0]
    assert json.loads(call) == {"name": name, "arguments": {"place": "library"}}
    assert '"description": "When a place in town opens and closes."' in text
