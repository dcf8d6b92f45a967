"""``AsyncEngine`` with a real engine process: streams, aborts, refusals, and every way in which a process can end."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_asyncio
from effort import proving
from tiny_llm import save_tiny_llm

from transect import LLM, AsyncEngine, SamplingParams
from transect.engine.frontends import wire
from transect.engine.frontends.async_engine import EngineDeadError
from transect.engine.frontends.questions import Questions
from transect.engine.scheduling.outputs import EngineOutput, RequestTimes, first_tokens_first
from transect.engine.scheduling.policies.admission import QueueFull

pytestmark = pytest.mark.asyncio(loop_scope="module")
CONTEXT = 16_384
"""So long that no answer without a limit ends while a busy machine keeps this process waiting."""
SETTINGS = {"dtype": "float32", "native": False, "threads": 1, "num_kv_blocks": 2 * CONTEXT // 16, "max_num_seqs": 8}
PATIENCE_S = 200
PROMPTS = [[5, 6, 7], list(range(40, 90)), [1], [9] * 33]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_llm(directory, max_position_embeddings=CONTEXT)
    return str(directory)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny, sockets):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(sockets))
        running = await AsyncEngine.start(model=tiny, **SETTINGS)
    async with running:
        yield running


@pytest.fixture(scope="module")
def sockets():
    """Where the engine's socket was while it started: a short path, as sockets want it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@contextlib.asynccontextmanager
async def own_engine(tiny, **settings):
    async with await AsyncEngine.start(model=tiny, **SETTINGS | settings) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tiny):
    """Gives engines by their settings; a new one if a test has ended the last."""
    started = []

    async def engine_with(**settings):
        for engine, others in started:
            if others == settings and engine.death is None:
                return engine
        started.append((await AsyncEngine.start(model=tiny, **SETTINGS | settings), settings))
        return started[-1][0]

    yield engine_with
    for engine, _ in started:
        await engine.shutdown()


@pytest_asyncio.fixture(loop_scope="module")
async def ahead(shared):
    """An engine that plans ahead, for two tests; the second one kills it."""
    return await shared(async_scheduling=True)


@pytest_asyncio.fixture(loop_scope="module")
async def crowded(shared):
    """An engine with room for one request and one that waits, for two tests; the second one shuts it down."""
    return await shared(max_num_seqs=1, max_queue=1, max_num_batched_tokens=64)


def endless(**params):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": None, "ignore_eos": True} | params)


async def last(generator):
    final = None
    async for output in generator:
        final = output
    return final


async def assert_idle(engine):
    """Called right after an abort was sent: the engine takes both messages between the same two steps."""
    stats = await engine.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)


def gone(pid):
    """The process has ended (a zombie has: nobody needs to have waited for it)."""
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True


async def eventually(condition, what):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {PATIENCE_S} s: {what}")
        await asyncio.sleep(0.05)


async def state_becomes(engine, state):
    """A busy machine may keep a healthy engine from answering for a while."""
    deadline = time.monotonic() + PATIENCE_S
    while (await engine.health()).state != state:
        assert time.monotonic() < deadline, f"not {state} within {PATIENCE_S} s"
        await asyncio.sleep(0.05)


# Streams ------------------------------------------------------------------------------------------------------------


async def test_concurrent_streams_give_what_llm_gives(engine, tiny):
    params = [
        endless(max_tokens=20, logprobs=2, prompt_logprobs=1),
        SamplingParams(seed=2**64 - 1, max_tokens=20, logit_bias={7: -5.0}, prompt_logprobs=0, prompt_logprobs_start=9),
        SamplingParams(seed=-3, n=3, max_tokens=15, top_p=0.9),
        endless(max_tokens=25, stop_token_ids=[4], min_tokens=5),
    ]
    expected = LLM(tiny, **SETTINGS).generate(PROMPTS, params)
    together = await asyncio.gather(
        *(last(engine.generate(prompt, each)) for prompt, each in zip(PROMPTS, params, strict=True))
    )
    for ours, theirs in zip(together, expected, strict=True):
        assert [choice.token_ids for choice in ours.outputs] == [choice.token_ids for choice in theirs.outputs]
        assert [choice.text for choice in ours.outputs] == [choice.text for choice in theirs.outputs]
        assert ours.finished and ours.prompt_token_ids == theirs.prompt_token_ids
    assert together[1].prompt_logprobs[:9] == [None] * 9 and together[1].prompt_logprobs == expected[1].prompt_logprobs
    assert len(together[0].prompt_logprobs) == len(PROMPTS[0]) and len(together[0].outputs[0].logprobs) == 20
    await assert_idle(engine)


async def test_a_caller_that_falls_behind_catches_up_in_one_update(engine):
    expected = (await last(engine.generate([5, 6, 7], endless(max_tokens=30)))).outputs[0]
    stream = engine.stream([5, 6, 7], endless(max_tokens=30), "slow")
    updates = [await anext(stream)]
    while (await engine.stats()).running:  # by now the engine is done with it, and waits for nobody
        await asyncio.sleep(0.01)
    updates += [update async for update in stream]
    assert len(updates) <= 3 and [update.finished for update in updates] == [False] * (len(updates) - 1) + [True]
    assert [token for update in updates for token in update.token_ids] == expected.token_ids
    assert "".join(update.text for update in updates) == expected.text


async def test_first_tokens_are_handed_out_before_others():
    times = RequestTimes(0.0, 1.0, 2.0)
    goes_on = EngineOutput("old", 0, [1])
    ends = EngineOutput("ends", 0, [2], finish_reason="length", times=times)
    begins = [EngineOutput(name, 0, [3], times=times) for name in ("new", "newer")]
    found = first_tokens_first([goes_on, ends, begins[0], begins[1]])
    assert [each.request_id for each in found] == ["new", "newer", "old", "ends"]


async def test_generate_grows_and_survives_a_consumer_slower_than_the_engine(engine):
    lengths = []
    async for output in engine.generate("hello", SamplingParams(n=3, seed=1, max_tokens=12, ignore_eos=True)):
        lengths.append(output.num_output_tokens)
        final = output
        await asyncio.sleep(0.02)
    assert lengths == sorted(lengths)
    assert final.finished and final.num_output_tokens == 36


async def test_stream_deltas_add_up_and_end_once_per_choice(engine):
    tokens, texts, ends = {0: [], 1: []}, {0: "", 1: ""}, []
    async for update in engine.stream([1, 2, 3], SamplingParams(n=2, seed=5, max_tokens=30), "deltas"):
        tokens[update.index] += update.token_ids
        texts[update.index] += update.text
        if update.finished:
            ends.append(update.index)
        final = update.final
    assert sorted(ends) == [0, 1]
    for choice in final.outputs:
        assert (choice.token_ids, choice.text) == (tokens[choice.index], texts[choice.index])


async def test_stop_string_ends_the_choice_in_the_engine(engine):
    free = (await last(engine.generate("hello", endless(max_tokens=60)))).outputs[0]
    stop = next(piece for piece in (free.text[i : i + 2] for i in range(8, 50)) if piece.isprintable())
    cut = (await last(engine.generate("hello", endless(stop=stop)))).outputs[0]
    assert cut.text == free.text[: free.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    await assert_idle(engine)


# Leaving ------------------------------------------------------------------------------------------------------------


async def test_closing_the_generator_frees_the_blocks_before_the_next_step(engine):
    stream = engine.generate(PROMPTS[1], endless())
    await anext(stream)
    assert (await engine.stats()).running == 1
    await stream.aclose()
    await assert_idle(engine)


async def test_cancelling_the_task_aborts(engine):
    started = asyncio.Event()

    async def consume():
        async for _ in engine.generate(PROMPTS[1], endless(n=3, temperature=1.0)):
            started.set()

    task = asyncio.create_task(consume())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await assert_idle(engine)


async def test_abort_by_id_gives_each_choice_one_terminal_update(engine):
    ends = []
    async for update in engine.stream(PROMPTS[0], endless(n=2, temperature=1.0), "to-abort"):
        if not ends and not update.finished:
            await engine.abort("to-abort")
        if update.finished:
            ends.append((update.index, update.finish_reason))
    assert sorted(ends) == [(0, "abort"), (1, "abort")]
    await engine.abort("to-abort")
    await engine.abort("never-there")
    await assert_idle(engine)


async def test_drain_waits_for_the_last_stream(engine):
    await asyncio.wait_for(engine.drain(), PATIENCE_S)
    task = asyncio.create_task(last(engine.generate(PROMPTS[0], endless(max_tokens=60))))
    await asyncio.sleep(0)
    await asyncio.wait_for(engine.drain(), PATIENCE_S)
    assert task.done() or len((await task).outputs[0].token_ids) == 60


# Refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt,params,message",
    [
        ("", {}, "prompt is empty"),
        ([], {}, "prompt is empty"),
        ([1] * CONTEXT, {}, f"context length is {CONTEXT}"),
        ([10**6], {}, "token id 1000000"),
        ([1], {"n": 9}, "n is 9"),
        ([1], {"stop_token_ids": [10**6]}, "stop_token_ids holds"),
    ],
)
async def test_bad_requests_are_value_errors_and_disturb_nothing(engine, prompt, params, message):
    other = engine.generate(PROMPTS[0], endless(max_tokens=10))
    await anext(other)
    with pytest.raises(ValueError, match=message):
        await last(engine.generate(prompt, SamplingParams(**params)))
    assert len((await last(other)).outputs[0].token_ids) == 10
    await assert_idle(engine)


async def test_what_are_no_params_is_a_value_error_too(engine):
    with pytest.raises(ValueError, match="not as dict"):
        await last(engine.generate([1], {"max_tokens": 3}))
    await assert_idle(engine)


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([1], {"priority": "high"}, "priority must be a whole number"),
        ([1], {"priority": 1.5}, "priority must be a whole number"),
        ([1], {"priority": 2**70}, "priority must be a whole number"),
        ([1], {"request_id": 7}, "request_id must be text"),
        ([1.0], {}, "prompt_token_ids must hold whole numbers"),
    ],
)
async def test_what_the_engine_could_not_read_does_not_reach_it(engine, ids, options, message):
    with pytest.raises(ValueError, match=message):
        await last(engine.stream(ids, endless(), **{"request_id": "x", **options}))
    assert len((await last(engine.generate([1], endless(max_tokens=3)))).outputs[0].token_ids) == 3


async def test_an_id_in_use_is_refused_and_the_first_goes_on(engine):
    first = engine.generate(PROMPTS[0], endless(max_tokens=30), "same")
    await anext(first)
    with pytest.raises(ValueError, match="already running"):
        await last(engine.generate(PROMPTS[0], endless(), "same"))
    assert len((await last(first)).outputs[0].token_ids) == 30


@pytest.mark.parametrize("plans_ahead", [False, True])
async def test_an_id_may_be_used_again_as_soon_as_its_request_has_been_left(engine, ahead, plans_ahead):
    """The engine still answers the first request, and its abort, when the second one of that name has been sent."""
    engine = ahead if plans_ahead else engine
    alone = (await last(engine.generate(PROMPTS[1], endless(max_tokens=9), "other"))).outputs[0]
    for after in range(1, 4):
        first = engine.generate(PROMPTS[0], endless(), "same")
        for _ in range(after):
            await anext(first)
        await first.aclose()
        again = (await last(engine.generate(PROMPTS[1], endless(max_tokens=9), "same"))).outputs[0]
        assert (again.token_ids, again.finish_reason) == (alone.token_ids, "length")
    await assert_idle(engine)


async def test_a_refusal_is_of_the_request_that_it_was_said_of(crowded):
    running, waiting = (crowded.generate(PROMPTS[0], endless()) for _ in range(2))
    await anext(running)
    in_queue = asyncio.create_task(anext(waiting))
    while (await crowded.stats()).waiting < 1:
        await asyncio.sleep(0.01)
    refused = asyncio.create_task(last(crowded.generate(PROMPTS[2], endless(), "same")))
    await asyncio.sleep(0)
    refused.cancel()
    in_queue.cancel()
    await asyncio.gather(refused, in_queue, return_exceptions=True)
    await running.aclose()
    assert len((await last(crowded.generate(PROMPTS[1], endless(max_tokens=3), "same"))).outputs[0].token_ids) == 3


async def test_a_full_queue_is_queue_full_and_shutdown_ends_streams_and_may_be_repeated(crowded):
    running = crowded.generate(PROMPTS[0], endless())
    await anext(running)
    waiting = asyncio.create_task(last(crowded.generate(PROMPTS[1], endless(max_tokens=3))))
    while (await crowded.stats()).waiting < 1:
        await asyncio.sleep(0.01)
    with pytest.raises(QueueFull) as refused:
        await last(crowded.generate(PROMPTS[2], endless()))
    assert refused.value.retry_after > 0
    await running.aclose()
    assert (await waiting).finished
    stream = crowded.generate(PROMPTS[0], endless())
    await anext(stream)
    await crowded.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await last(stream)
    await crowded.shutdown()
    assert gone(crowded.pid)


async def test_a_stopped_engine_does_not_unbind_the_queue(engine, monkeypatch):
    """What lies in the socket is bounded too, and a client that leaves takes nothing back out of it."""
    monkeypatch.setattr(engine, "config", dataclasses.replace(engine.config, max_queue=2))
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        for _ in range(2 + SETTINGS["max_num_seqs"]):
            task = asyncio.create_task(last(engine.generate([1], endless(max_tokens=3))))
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        with pytest.raises(QueueFull) as refused:
            await asyncio.wait_for(last(engine.generate([1], endless(max_tokens=3))), PATIENCE_S)
        assert refused.value.retry_after > 0
    finally:
        os.kill(engine.pid, signal.SIGCONT)
    deadline = time.monotonic() + PATIENCE_S
    while engine._taken < engine._submitted:  # the engine tells with its answers how much it has read
        assert time.monotonic() < deadline
        await engine.stats()
    assert len((await last(engine.generate([1], endless(max_tokens=3)))).outputs[0].token_ids) == 3
    await assert_idle(engine)


async def test_too_many_choices_are_refused_before_anything_is_built_for_them(engine, monkeypatch):
    def add(*args, **kwargs):
        pytest.fail("the text side was asked first")

    monkeypatch.setattr(engine._processor, "add", add)
    with pytest.raises(ValueError, match="n is 128, but the engine runs 8 sequences"):
        await last(engine.generate([1], SamplingParams(n=128, stop=["x" * 100] * 40)))


async def test_a_running_engine_has_no_folder(engine, sockets):
    """So that nothing is left of it, whatever ends this process."""
    assert not list(sockets.iterdir())
    assert str(sockets) in Path("/proc/net/unix").read_text(), "it was there while the engine started"


# Ends of the process ------------------------------------------------------------------------------------------------


async def test_a_killed_engine_gives_every_stream_one_clean_error(ahead):
    streams = [ahead.generate(prompt, endless()) for prompt in PROMPTS]
    for stream in streams:
        await anext(stream)
    os.kill(ahead.pid, signal.SIGKILL)
    results = await asyncio.wait_for(asyncio.gather(*map(last, streams), return_exceptions=True), PATIENCE_S)
    assert [type(result) for result in results] == [EngineDeadError] * len(PROMPTS)
    assert all("killed by signal 9" in str(result) for result in results)
    assert (await ahead.health()).state == "dead"
    with pytest.raises(EngineDeadError):
        await last(ahead.generate([1]))
    with pytest.raises(EngineDeadError):
        await ahead.stats()
    await asyncio.wait_for(ahead.drain(), PATIENCE_S)


async def test_a_hung_engine_is_told_from_a_live_one_and_ctrl_c_does_not_reach_it(engine, monkeypatch):
    monkeypatch.setattr(engine, "config", dataclasses.replace(engine.config, hung_after_s=1.0))
    os.kill(engine.pid, signal.SIGINT)
    os.kill(engine.pid, signal.SIGTERM)
    await state_becomes(engine, "ok")
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        stream = asyncio.create_task(last(engine.generate([1], endless(max_tokens=5))))
        await state_becomes(engine, "hung")
    finally:
        os.kill(engine.pid, signal.SIGCONT)
    assert len((await asyncio.wait_for(stream, PATIENCE_S)).outputs[0].token_ids) == 5
    await state_becomes(engine, "ok")


async def test_messages_on_their_way_to_an_engine_that_dies_end_with_it():
    """Nobody is there to take them: a request that waits for that hears why, and one whose client left is cancelled."""
    engine = AsyncEngine.__new__(AsyncEngine)
    loop = asyncio.get_running_loop()
    engine._socket = SimpleNamespace(send=lambda message: loop.create_future())
    engine._death, engine._streams, engine._questions, engine._sending = None, {}, Questions(), set()
    waiting, left = (asyncio.create_task(engine._send(wire.StatsQuery())) for _ in range(2))
    await asyncio.sleep(0)
    left.cancel()
    engine._die("it was killed")
    found = await asyncio.gather(waiting, left, return_exceptions=True)
    assert isinstance(found[0], EngineDeadError) and "it was killed" in str(found[0])
    assert isinstance(found[1], asyncio.CancelledError) and not engine._sending


async def test_a_layout_that_cannot_be_is_refused_before_a_process_is_started(tiny, monkeypatch):
    monkeypatch.setattr(asyncio, "create_subprocess_exec", None)
    with pytest.raises(ValueError, match="pipeline_parallel_size is 31"):
        await AsyncEngine.start(model=tiny, pipeline_parallel_size=31)


async def test_a_start_that_fails_is_one_clean_exception(tiny, capfd):
    with pytest.raises(ValueError, match="max_model_len is 100000"):
        await AsyncEngine.start(model=tiny, **SETTINGS, max_model_len=100000)
    if proving():  # the same way to fail
        with pytest.raises(ValueError, match="MiB are free"):
            await AsyncEngine.start(model=tiny, **SETTINGS | {"num_kv_blocks": 10**12})
    assert "Traceback" not in capfd.readouterr().err
    with pytest.raises(TypeError, match="max_nun_seqs"):
        await AsyncEngine.start(model=tiny, max_nun_seqs=1)


async def test_an_engine_ends_with_its_parent(tiny):
    script = f"""
        import asyncio, os, signal
        from transect import AsyncEngine
        async def main():
            engine = await AsyncEngine.start(model={tiny!r}, **{SETTINGS!r})
            print(engine.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
    """
    parent = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert parent.returncode == -signal.SIGKILL
    pid = int(parent.stdout)
    await eventually(lambda: gone(pid), "the engine has ended")


async def test_a_bug_in_one_request_s_text_ends_that_request_alone(engine, monkeypatch):
    process = engine._processor.process

    def broken(output):
        if output.request_id == "unlucky":
            raise RuntimeError("planted")
        return process(output)

    monkeypatch.setattr(engine._processor, "process", broken)
    lucky = asyncio.create_task(last(engine.generate(PROMPTS[0], endless(max_tokens=20), "lucky")))
    with pytest.raises(RuntimeError, match="planted"):
        await asyncio.wait_for(last(engine.generate(PROMPTS[1], endless(), "unlucky")), PATIENCE_S)
    assert len((await asyncio.wait_for(lucky, PATIENCE_S)).outputs[0].token_ids) == 20
    await assert_idle(engine)
    assert time.monotonic() - engine.heard < engine.config.silence_s


async def test_streams_end_when_the_engine_s_messages_cannot_be_read(tiny, monkeypatch):
    async with own_engine(tiny) as engine:
        stream = engine.generate(PROMPTS[0], endless())
        await anext(stream)
        monkeypatch.setattr(engine, "_take", None)
        with pytest.raises(EngineDeadError, match="could not be read"):
            await asyncio.wait_for(last(stream), PATIENCE_S)
        assert (await engine.health()).state == "dead"
    await eventually(lambda: gone(engine.pid), "the engine has ended")
