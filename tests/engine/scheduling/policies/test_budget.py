"""Steps that are sized by time: the shipping scheduler on a device whose steps take a known time."""

import statistics
from types import SimpleNamespace

import pytest
from small_engine import lengths, request
from timed_device import BASE, EACH, Device, Pending, Processor, engine

from transect.costs.steps import StepLoad
from transect.engine.executors.gpu.step_sizes import token_bucket
from transect.engine.leading import FollowingCore, LeadingCore, Orders
from transect.engine.scheduling.batch import ScheduledBatch
from transect.engine.scheduling.core import EngineCore
from transect.engine.scheduling.policies.budget import AUTO_RATIO, LEARN_STEPS, even


class Reading(Device):
    """Reads weights for as long as 200 tokens take to be computed."""

    def seconds(self, tokens: int) -> float:
        return max(4e-3, 2e-5 * tokens)


def taught(lag: int = 0, **limits) -> EngineCore:
    """An engine that has seen steps of many sizes, and has two sequences that go on decoding."""
    core = engine(lag, **limits)
    for index in range(8):
        core.add(request(f"lesson {index}", prompt=40 * (index + 1), first=100 + index, max_tokens=12))
        while core.has_work:
            core.step()
    for name in ("a", "b"):
        core.add(request(name, prompt=4, first=len(name), max_tokens=3000))
    for _ in range(2 * LEARN_STEPS):
        core.step()
    core.executor.batches.clear()
    return core


def sizes(core: EngineCore, steps: int) -> list[list[int]]:
    first = len(core.executor.batches)
    for _ in range(steps):
        core.step()
    return [lengths(batch) for _, batch in core.executor.batches[first:]]


def test_steps_are_of_whole_tiles_where_that_leaves_room():
    assert [even(tokens, 8) for tokens in (100, 130, 300, 500, 700, 1100, 1200, 1900)] == [
        100,
        128,
        256,
        384,
        640,
        1024,
        1024,
        1792,
    ]
    assert even(300, 200) == 300, "256 would leave 56 of 100 tokens for prompts"
    assert even(250, 8) == 250, "a step of 192 would be filled up to 256"
    rounded = {even(tokens, 8) for tokens in range(64, 2048) if even(tokens, 8) != tokens}
    assert rounded == {size for size in rounded if token_bucket(size) == size}, "a graph is for each"


def test_prompts_do_not_wait_for_streams_that_alone_take_longer_than_the_target():
    core = taught(itl_target=1e-3)
    core.add(request("short", prompt=5, first=7, max_tokens=2))
    assert sum(sum(step[2:]) for step in sizes(core, 8)) == 6, "all of it, and its first token beside theirs"


@pytest.mark.parametrize("lag", [0, 1])
def test_a_prompt_is_cut_into_steps_that_take_no_longer_than_the_target(lag):
    core = taught(lag, itl_target=20e-3)
    core.add(request("long", prompt=500, first=7, max_tokens=2))
    chunks = [sum(step) for step in sizes(core, 4)]
    fitting = (20e-3 - BASE) / EACH
    assert len(chunks) == 4 and all(0.8 * fitting <= chunk <= 1.1 * fitting for chunk in chunks[:3])


def test_without_a_number_a_step_takes_a_multiple_of_what_the_decodes_take():
    core = taught(itl_target=0.0)
    core.add(request("long", prompt=300, first=7, max_tokens=2))
    alone = BASE + 2 * EACH
    assert sum(sizes(core, 1)[0]) == pytest.approx((AUTO_RATIO * alone - BASE) / EACH, rel=0.15) and AUTO_RATIO == 2.5


@pytest.mark.parametrize("scored", [None, 5])
def test_the_bound_holds_to_the_end_of_a_long_prompt(scored):
    """Steps deep in the prompt took 4.5 times as long as the decodes: attention was counted as the work of tokens, and
    the tokens that prompts are guaranteed as decodes. At last a step of 256 tokens took 48 times as long."""
    core = engine(device=Processor, itl_target=0.0, max_num_batched_tokens=256, max_model_len=9000)
    core.add(request("stream", prompt=4, max_tokens=8000))
    for _ in range(100):
        core.step()
    core.add(request("long", prompt=8000, first=7, max_tokens=2, prompt_logprobs=scored))
    early, late = [], []
    while "long" in core.scheduler.requests:
        core.step()
        rows = core.executor.batches[-1][1].rows
        alone = 9e-3 + 3.7e-6 * (rows[0].start + 1)
        ratio = core.executor.seconds(core.executor.load.tokens) / alone
        context = 3.7e-6 * rows[1].start if len(rows) > 1 else 0.0
        if len(rows) == 2 and not late:  # no pause so far
            early.append(ratio)
        else:
            late.append(ratio)
            assert ratio < 1.1 * max(AUTO_RATIO, 1 + 2 * (context + 4e-3) / alone)
    assert 100 < len(early) < len(late) and sorted(early)[len(early) * 95 // 100] < 1.1 * AUTO_RATIO
    for ratios in (early, late):
        assert 0.9 * AUTO_RATIO < statistics.mean(ratios) < 1.05 * AUTO_RATIO, (
            "and the prompt gets the time that is left"
        )


def test_a_time_of_slow_steps_does_not_make_reads_of_contexts_look_slow_for_long():
    """The time of a read of the context and that of tokens which attend to it are told apart by few chunks of another
    size. Else the slow steps count as slow reads, chunks grow to be worth one, and steps take 9 times the decodes'."""

    class Disturbed(Processor):
        def seconds(self, tokens: int) -> float:
            return self.undisturbed(tokens) * (2.0 if 400 < len(self.batches) < 700 else 1.0)

        def undisturbed(self, tokens: int) -> float:
            load = self.load
            return 6e-3 + 1.3e-3 * tokens + 1.2e-6 * (load.keys + load.context) + 5.5e-7 * load.pairs

    core = engine(device=Disturbed, itl_target=0.0, max_num_batched_tokens=256, max_model_len=9000)
    core.add(request("stream", prompt=4, max_tokens=8000))
    for _ in range(100):
        core.step()
    core.add(request("long", prompt=6000, first=7, max_tokens=2))
    ratios = []
    while "long" in core.scheduler.requests:
        core.step()
        if len(rows := core.executor.batches[-1][1].rows) > 1 and rows[1].start > 4000:
            alone = 7.3e-3 + 1.2e-6 * (rows[0].start + 1)
            ratios.append(core.executor.undisturbed(core.executor.load.tokens) / alone)
    assert sorted(ratios)[len(ratios) * 99 // 100] < 1.2 * AUTO_RATIO


def test_steps_are_as_large_as_any_where_nobody_decodes_or_nothing_is_known():
    core = engine(itl_target=1e-3)
    core.add(request("first", prompt=900, max_tokens=20))
    assert sizes(core, 1) == [[900]]
    core.add(request("second", prompt=900, first=3, max_tokens=2))
    assert sizes(core, 1) == [[1, 900]], "eight steps teach something, one does not"


def test_a_long_queue_makes_steps_longer():
    """300 prompt tokens take three steps of 12 ms each; 12,000 would take 150."""
    few, many = taught(itl_target=12e-3), taught(itl_target=12e-3)
    few.add(request("0", prompt=300, first=7, max_tokens=2))
    for index in range(6):
        many.add(request(str(index), prompt=2000, first=7 + index, max_tokens=2))
    assert sum(sizes(few, 1)[0]) < 100
    assert sum(sizes(many, 1)[0]) == 896


def test_where_many_steps_have_prompts_they_have_no_more_tokens_than_are_cheap():
    def first_step(prompts: int, busy: bool) -> int:
        core = taught(device=Reading, itl_target=0.0)
        for _ in range(40 if busy else 0):
            core.scheduler.budget.planned(True)
        for index in range(prompts):
            core.add(request(str(index), prompt=450, first=7 + index, max_tokens=2))
        return sum(sizes(core, 1)[0])

    assert first_step(1, busy=False) == 384, "the target allows 500: whole tiles"
    assert first_step(1, busy=True) == 256
    assert first_step(3, busy=True) == 384, "four steps of 256 would not be enough"


def test_steps_that_take_long_to_launch_are_for_long_queues():
    core = taught(itl_target=90e-3, graph_tokens=256)
    core.add(request("0", prompt=900, first=7, max_tokens=2))
    assert sum(sizes(core, 1)[0]) == 256, "the target would allow 860"
    for index in range(3):
        core.add(request(str(index + 1), prompt=2000, first=8 + index, max_tokens=2))
    assert sum(sizes(core, 1)[0]) > 512


def test_a_step_that_has_a_graph_takes_no_more_prompts_than_the_graph_has_rows_for():
    def steps(prompt: int) -> list[list[int]]:
        core = engine(itl_target=0.0, graph_tokens=256, graph_prompts=3)
        for index in range(7):
            core.add(request(str(index), prompt=prompt, first=7 + index, max_tokens=9))
        return sizes(core, 3)

    assert steps(20) == [[20] * 3, [1] * 3 + [20] * 3, [1] * 6 + [20]]
    assert steps(120)[0] == [120] * 7, "more tokens than a graph has"


def test_a_long_prompt_leaves_half_of_each_step_to_those_behind_it():
    core = taught(itl_target=30e-3)
    core.add(request("long", prompt=3000, first=7, max_tokens=2))
    sizes(core, 2)
    core.add(request("short", prompt=100, first=8, max_tokens=2))
    (step,) = sizes(core, 1)
    assert len(step) == 4 and step[3] == 100, "the short one is through at once"
    assert step[2] >= 100, "and the long one goes on"
    core.add(request("also short", prompt=50, first=9, max_tokens=2))
    assert sizes(core, 1)[0][-1] == 50


def test_a_long_prompt_leaves_two_thirds_to_several_behind_it_also_in_longer_steps():
    """More prompts wait, so steps are longer than the target; the long one would now fit into four of them."""
    core = taught(itl_target=12e-3)
    core.add(request("long", prompt=1700, first=7, max_tokens=2))
    sizes(core, 2)
    for index in range(6):
        core.add(request(str(index), prompt=450, first=8 + index, max_tokens=2))
    (step,) = sizes(core, 1)
    room = sum(step[2:])
    assert room > 250 and 4 * room > 1700, "a longer step"
    assert sum(step[3:]) == pytest.approx(2 * room / 3, abs=1)


def test_several_long_prompts_leave_as_much_as_one_does():
    """They have one share together: the first goes on, and short ones go before those that wait."""
    core = taught(itl_target=30e-3)
    for index in range(3):
        core.add(request(f"long {index}", prompt=3000, first=7 + index, max_tokens=2))
    sizes(core, 2)
    core.add(request("short", prompt=100, first=11, max_tokens=2))
    (step,) = sizes(core, 1)
    assert len(step) == 4 and step[3] == 100, "the short one is through at once"
    assert step[2] > 100, "the first long one has the rest"
    assert [seq.request_id for seq in core.scheduler.waiting.in_order()] == ["long 1", "long 2"]


def test_lengths_share_a_step_and_what_the_shorter_leave_is_for_the_longer():
    core = taught(itl_target=30e-3, num_blocks=9000, max_model_len=16000)
    core.add(request("longest", prompt=15000, first=7, max_tokens=2))
    sizes(core, 1)
    for index, prompt in enumerate((7000, 6000, 40)):
        core.add(request(str(index), prompt=prompt, first=8 + index, max_tokens=2))
    (step,) = sizes(core, 1)
    rows = dict(zip([seq.request_id for seq in core.scheduler._last[-1]], step, strict=True))
    assert rows["2"] == 40 and "1" not in rows, "the two in the middle have one share"
    assert rows["longest"] - rows["0"] in (0, 1)


def test_a_long_conversation_that_is_cached_is_a_short_prompt():
    """Its next turn neither waits as long prompts do nor makes steps longer."""
    core = taught(itl_target=12e-3, num_blocks=9000, max_model_len=16000)
    core.add(request("turn 1", prompt=6000, first=5, max_tokens=1))
    while "turn 1" in core.scheduler.requests:
        core.step()
    core.add(request("long", prompt=7000, first=9, max_tokens=2))
    (alone,) = sizes(core, 1)
    core.add(request("turn 2", prompt=6050, first=5, max_tokens=2))
    (step,) = sizes(core, 1)
    assert core.scheduler.waiting.num_tokens == 0 and 25 <= step[-1] <= 66, "at least half of its share"
    assert sum(step) == pytest.approx(sum(alone), rel=0.1)


def test_who_goes_before_a_long_prompt_leaves_it_its_kv_blocks():
    """The second long prompt will need 157 blocks of the 187 that are left: one short prompt of 20 fits beside it."""
    core = engine(itl_target=20e-3, num_blocks=344, max_model_len=3000, watermark=0.0)
    for index in range(2):
        core.add(request(f"long {index}", prompt=2500, first=3 + index, max_tokens=2))
    sizes(core, 1)
    for index in range(2):
        core.add(request(f"short {index}", prompt=320, first=7 + index, max_tokens=2))
    sizes(core, 1)
    assert [seq.request_id for seq in core.scheduler.waiting.in_order()] == ["long 1", "short 1"]
    assert core.scheduler.held_back == "kv"


def test_a_prompt_longer_than_the_largest_step_leaves_room_where_nobody_decodes():
    core = engine(itl_target=20e-3)
    core.add(request("long", prompt=3500, max_tokens=2))
    assert sizes(core, 1) == [[1000]]
    core.add(request("short", prompt=100, first=3, max_tokens=2))
    assert sizes(core, 1) == [[900, 100]]
    alike = engine(itl_target=20e-3)
    for index in range(2):
        alike.add(request(str(index), prompt=3500, first=3 + index, max_tokens=2))
    assert sizes(alike, 3) == [[1000]] * 3, "of two that are alike the first is not held up"


def test_a_long_prompt_leaves_no_room_for_those_that_cannot_be_admitted():
    """No KV blocks are left for the short one. Whether there are some now is tried in every second step."""
    core = engine(itl_target=20e-3, num_blocks=222)
    core.add(request("long", prompt=3500, max_tokens=2))
    sizes(core, 1)
    core.add(request("short", prompt=100, first=3, max_tokens=2))
    assert sizes(core, 3) == [[900], [1000], [600]]


def test_one_long_prompt_is_no_long_queue():
    """Streams feel no longer steps because one user's prompt is long; they do because many wait."""

    def first_step(*prompts: int) -> int:
        core = taught(itl_target=12e-3)
        for index, prompt in enumerate(prompts):
            core.add(request(str(index), prompt=prompt, first=7 + index, max_tokens=2))
        return sum(sizes(core, 1)[0])

    assert first_step(300) == first_step(2048) == first_step(3500) < first_step(3500, 3500)


def test_outputs_are_the_same_however_steps_are_sized():
    def outputs(**limits):
        core = engine(**limits)
        found: dict[str, int] = {}
        coming = [request(str(index), prompt=100 * (index + 1), first=index + 1, max_tokens=30) for index in range(8)]
        while coming or core.has_work:
            if coming and len(core.executor.batches) % 6 == 0:
                core.add(coming.pop(0))
            for output in core.step():
                found[output.request_id] = found.get(output.request_id, 0) + len(output.new_token_ids)
        return found, max(batch.num_tokens for _, batch in core.executor.batches[20:])

    by_time, largest = outputs(itl_target=10e-3)
    plain, larger = outputs()
    assert by_time == plain == {str(index): 30 for index in range(8)}
    assert largest < larger / 2


def late(core: EngineCore, until: float) -> None:
    """The loop of a server: steps are planned when it is time, until a moment comes."""
    clock = core.scheduler.clock
    while clock.now() < until:
        wait = core.time_to_plan()
        if wait > 0:
            clock.advance(min(wait, until - clock.now()))
        else:
            core.step()


def test_a_request_that_comes_while_a_step_runs_is_part_of_the_next():
    core = taught(lag=1, itl_target=0.0)
    clock, device = core.scheduler.clock, core.executor
    late(core, clock.now() + 0.2)
    began = device.batches[-1][0]
    late(core, began + BASE / 2)
    planned = len(device.batches)
    core.add(request("new", prompt=6, first=7, max_tokens=2))
    late(core, began + 3 * BASE)
    assert lengths(device.batches[planned][1]) == [1, 1, 6]
    gaps = [after - before for (before, _), (after, _) in zip(device.batches, device.batches[1:], strict=False)]
    took = [BASE + EACH * batch.num_tokens for _, batch in device.batches]
    idle = sum(gap - seconds for gap, seconds in zip(gaps, took, strict=False)) / sum(gaps)
    assert idle < 0.01, "the device did not wait for its plans"


def stands_still(slow: dict[int, float], steps: int = 400, usual: float = 10e-3) -> float:
    """Seconds for which a device waits for plans, whose steps with the numbers ``slow`` take longer than usual."""

    class Hiccups(Device):
        def seconds(self, tokens: int) -> float:
            return slow.get(len(self.batches), usual)

    core = engine(lag=1, device=Hiccups, itl_target=0.0)
    clock, device = core.scheduler.clock, core.executor
    for name in ("a", "b"):
        core.add(request(name, prompt=4, first=len(name), max_tokens=3000))
    while len(device.batches) < steps:
        if (wait := core.time_to_plan()) > 0:
            clock.advance(wait)
        else:
            core.step()
    took = sum(slow.get(number, usual) for number in range(steps - 1))
    return device.batches[-1][0] - device.batches[0][0] - took


@pytest.mark.parametrize(
    "slow",
    [
        {0: 3.0, 1: 3.0},
        {0: 0.5, 1: 0.5, 2: 0.5},
        dict.fromkeys(range(20), 3.0),
        {0: 3.0, 5: 3.0, 6: 3.0},
        {200: 3.0, 201: 3.0},
        dict.fromkeys(range(100, 140), 0.5),
    ],
    ids=["two", "three", "twenty", "now and then", "late", "for a while"],
)
def test_a_device_waits_less_than_one_step_for_plans_after_steps_that_took_long(slow):
    """It waited for 70 s after two steps of 3 s, and for 13 s after three of 0.5 s."""
    assert 0 <= stands_still(slow) < 10e-3


def test_there_is_nothing_to_wait_for_where_prompts_fill_the_next_step():
    core = taught(lag=1, itl_target=20e-3)
    core.add(request("short", prompt=20, first=7, max_tokens=2))
    assert core.time_to_plan() > 0
    core.add(request("long", prompt=500, first=8, max_tokens=2))
    assert core.scheduler.coming().full and core.time_to_plan() == 0


class Slow(Device):
    """Its host takes 30 ms to launch a step of more than 64 tokens."""

    def submit(self, batch: ScheduledBatch) -> Pending:
        handle = super().submit(batch)
        self.clock.advance(30e-3 if batch.num_tokens > 64 else 0.0)
        return handle


def test_steps_that_take_long_to_launch_are_planned_earlier():
    """They take the host 30 ms; one of them was launched before."""

    core = taught(lag=1, itl_target=90e-3, graph_tokens=64)
    core.executor = Slow(core.scheduler.clock)
    core.add(request("large", prompt=400, first=7, max_tokens=2))
    core.step()
    known = core.scheduler.times.predict(StepLoad(2))
    assert known == pytest.approx(BASE + 2 * EACH, rel=0.1), "a step that ended during the launch teaches nothing"
    assert core.time_to_plan() > 0
    core.add(request("another", prompt=300, first=8, max_tokens=2))
    assert core.scheduler.coming() == (303, False) and core.time_to_plan() == 0


def test_what_takes_long_to_launch_counts_from_the_end_of_the_step_before():
    """The step before ends while it is launched, and the host sees that only then: the launch is part of its time."""

    core = taught(lag=1, itl_target=90e-3, graph_tokens=64)
    busy = core.executor.free_at
    core.executor = Slow(core.scheduler.clock)
    core.executor.free_at = busy
    times, told = core.scheduler.times, []
    learn = times.learn
    times.learn = lambda load, seconds: (told.append((load.tokens, seconds)), learn(load, seconds))
    for index in range(4):
        core.add(request(f"large {index}", prompt=300 + 20 * index, first=7 + index, max_tokens=2))
        for _ in range(6):
            core.step()
    large = [(tokens, seconds) for tokens, seconds in told if tokens > 64]
    assert len(large) == 4
    for tokens, seconds in large:
        assert seconds == pytest.approx(BASE + EACH * tokens, rel=0.1)
    small = [seconds for tokens, seconds in told if tokens <= 64]
    assert min(small) > 0.7 * BASE and max(small) < 1.3 * (BASE + 3 * EACH)


def test_ranks_of_a_pipeline_plan_the_same_steps():
    """The others hear how long a step took only with the next orders of rank 0."""

    class Uneven(Device):
        def seconds(self, tokens: int) -> float:
            return super().seconds(tokens) * (1.0, 1.4, 0.7)[len(self.batches) % 3]

    limits = {"lag": 1, "device": Uneven, "itl_target": 20e-3, "pipeline_depth": 2}
    follower = FollowingCore(engine(**limits))

    def announce(orders: Orders) -> None:
        for name, arguments, _ in orders.messages:
            getattr(follower, name)(*arguments)
        follower.step()

    ranks = SimpleNamespace(check=lambda: None, world=SimpleNamespace(announce=announce), explain=lambda error: error)
    core = LeadingCore(engine(**limits), ranks)
    for index in range(20):
        core.add(request(str(index), prompt=200 + 10 * index, first=7 + index, max_tokens=12))
        for _ in range(3):
            core.step()
    planned = [[lengths(batch) for _, batch in each.executor.batches] for each in (core, follower)]
    assert planned[0] == planned[1] and len(planned[0]) > 40


def test_there_is_nothing_to_wait_for_without_a_step_in_flight_or_a_target():
    assert engine(itl_target=0.0).time_to_plan() == 0
    assert taught(lag=0, itl_target=0.0).time_to_plan() == 0
    core = engine(lag=1)
    core.add(request("a", max_tokens=9))
    core.step()
    core.step()
    assert core.time_to_plan() == 0


@pytest.mark.parametrize("target", [-1.0, float("nan"), float("inf")])
def test_a_target_is_a_number_of_seconds(target):
    with pytest.raises(ValueError, match="itl_target must be a number of seconds"):
        engine(itl_target=target)
