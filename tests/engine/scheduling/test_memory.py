"""The engine loop keeps no memory of requests that have ended, however many clients there were."""

import gc
import random
import sys

import pytest
from decision_logs import log_for
from msgspec import structs
from small_engine import request
from timed_device import Processor, engine

REQUESTS, AT_ONCE, LONG = 3000, 40, 300
LIMITS = {"num_blocks": 60, "max_model_len": 2 * LONG, "max_num_seqs": 16, "max_queue": AT_ONCE, "itl_target": 0.0}
KINDS = ({}, {"logprobs": 2}, {"n": 2}, {"prompt_logprobs": 0}, {"bad_words_token_ids": ((1, 2),)}, {"eos": (1,)})


class Forgetful(Processor):
    def submit(self, batch):
        self.batches.clear()
        return super().submit(batch)


def run(core, chance, names):
    """Run requests of all kinds, half of them of a client each; some are aborted. One of another client is under way at
    the end, because an engine without work forgets more."""
    left, live = list(names), []
    while left or len(core.scheduler.requests) > 1:
        while left and len(core.scheduler.requests) < AT_ONCE:
            name = f"request {left.pop()}"
            long = 300 if chance.random() < 0.02 else 20
            made = request(
                name, chance.randint(1, long), first=chance.randrange(10_000), **chance.choice(KINDS),
                max_tokens=chance.randint(1, 12),
            )  # fmt: skip
            pooling = "last" if chance.random() < 0.1 and made.params.n == 1 else None
            client = chance.choice((name, f"client {chance.randrange(4)}"))
            core.add(structs.replace(made, client=client, pooling=pooling))
            live.append(name)
            if not left:
                core.add(structs.replace(request(f"long {name}", max_tokens=LONG), client="long"))
        if chance.random() < 0.05:
            core.abort(chance.choice(live[-AT_ONCE:]))
        core.step()
        core.scheduler.clock.advance(max(0.0, core.time_to_plan()))


@pytest.mark.parametrize("lag", [0, 1])
def test_requests_that_have_ended_leave_nothing(lag):
    core, chance = engine(lag, device=Forgetful, **LIMITS), random.Random(1)
    core.decisions = log_for(core, sink=lambda record: None)
    allocated = []
    for turn in range(2):
        run(core, chance, range(turn * REQUESTS, (turn + 1) * REQUESTS))
        gc.collect()
        allocated.append(sys.getallocatedblocks())
        assert core.has_work
    assert sum(core.scheduler.stats().finished.values()) > 2 * REQUESTS
    assert allocated[1] - allocated[0] < REQUESTS / 2
