"""A student's scheduler in the live engine gives the answers of the shipped one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_llm import save_tiny_llm

from transect import LLM, SamplingParams
from transect.engine.build import scheduler_class
from transect.engine.scheduling.scheduler import Scheduler
from transect.learn.live import PROGRAM, server_options
from transect.learn.registry import get

PROMPTS = ["Hello", "The sea is", "A", "One two three four five six seven eight nine ten", "x y z", "Why"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llm(folder)
    return str(folder)


@pytest.mark.parametrize("blocks", [40, 9])
def test_the_students_scheduler_serves_the_same_tokens(model: str, tmp_path: Path, blocks: int) -> None:
    """Also where the pool is so small that it must preempt."""
    rung = get("scheduler")
    program = tmp_path / "scheduler.py"
    program.write_text(rung.solution)
    live = tmp_path / "live.py"
    live.write_text(PROGRAM.format(path=str(program)))
    settings = {"async_scheduling": False, "enable_prefix_caching": False, "num_kv_blocks": blocks, "max_num_seqs": 4,
                "max_num_batched_tokens": 16, "max_model_len": 100, "device": "cpu"}  # fmt: skip
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    want = [each.outputs[0].token_ids for each in LLM(model, **settings).generate(PROMPTS, params)]
    mine = LLM(model, scheduler_cls=f"{live}:Scheduler", **settings)
    assert type(mine._core.scheduler).__name__ == "LiveScheduler"
    assert [each.outputs[0].token_ids for each in mine.generate(PROMPTS, params)] == want
    assert (mine._core.stats().preemptions > 0) == (blocks == 9)
    with pytest.raises(ValueError, match="n = 1"):
        mine.generate(PROMPTS[:1], SamplingParams(n=2, max_tokens=2, temperature=1.0))
    with pytest.raises(ValueError, match="plans no rows with drafts"):
        LLM(model, scheduler_cls=f"{live}:Scheduler", speculative_config={"method": "ngram"}, **settings)


def test_a_scheduler_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    assert scheduler_class(None) is Scheduler
    assert scheduler_class("transect.engine.scheduling.scheduler.Scheduler") is Scheduler
    (tmp_path / "other.py").write_text("class Other: pass\n")
    for name in ("nothing.at.all", f"{tmp_path}/gone.py:A", f"{tmp_path}/other.py:Missing"):
        with pytest.raises(ValueError, match=r"FILE\.py:Class"):
            scheduler_class(name)
    with pytest.raises(ValueError, match="subclass"):
        scheduler_class(f"{tmp_path}/other.py:Other")


def test_only_a_rung_with_a_place_in_the_server_is_used(tmp_path: Path) -> None:
    with server_options(get("scheduler"), tmp_path / "scheduler.py") as options:
        assert options[0] == "--scheduler-cls" and Path(options[1].split(":")[0]).is_file()
    with pytest.raises(ValueError, match="only the rung scheduler"), server_options(get("line"), tmp_path / "line.py"):
        pass
