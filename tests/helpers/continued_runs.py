"""Answers of a model on a CPU that are cut after every token and continued in another engine, compared to the bit."""

import random

import msgspec
import torch
from runner_fuzz import VOCAB, Arrival, random_arrivals, random_model, run_workload

from transect.engine.executors.runner import Runner
from transect.engine.scheduling.scheduler_config import SchedulerConfig


def run(config: SchedulerConfig, arrivals: list[Arrival], lag: int) -> dict:
    model = random_model()
    caches = model.new_kv_cache(config.num_blocks, config.block_size, torch.float32)
    return run_workload(Runner(model, *caches), config, arrivals, lag)[0]


def cuts(arrival: Arrival, whole: dict, rng: random.Random) -> list[Arrival]:
    """The request after every number of tokens of its longest choice; the others have a few tokens more or fewer."""
    request = arrival.request
    answers = [whole[request.request_id, choice] for choice in range(request.params.n)]
    if any(answer["end"][0] == "error" for answer in answers):
        return []
    found = []
    for count in range(max(len(answer["tokens"]) for answer in answers)):
        counts = [max(1, count + rng.randint(-2, 2)) if count and request.params.n > 1 else count for _ in answers]
        begun = tuple(
            tuple(answer["tokens"][:known]) if known < len(answer["tokens"]) else None
            for answer, known in zip(answers, counts, strict=True)
        )
        if any(tokens is not None for tokens in begun):
            name = f"{request.request_id}@{count}"
            again = msgspec.structs.replace(request, request_id=name, output_token_ids=begun)
            found.append(Arrival(again, rng.randint(0, 20), None))
    return found


def check_cuts(seed: int) -> int:
    """Cut random requests after every token, and continue them beside each other in other chunks and less memory.

    Returns:
        The number of continued requests.
    """
    rng = random.Random(seed)
    arrivals = random_arrivals(rng, VOCAB, 8)
    for each in arrivals:
        each.abort_after = None
    limits = {"max_model_len": 64, "seed": 3}
    roomy = SchedulerConfig(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, **limits)
    whole = run(roomy, arrivals, lag=0)
    tight = SchedulerConfig(
        num_blocks=rng.randint(20, 40),
        block_size=4,
        max_num_seqs=5,
        max_num_batched_tokens=rng.randint(7, 20),
        **limits,
    )
    again = [cut for each in arrivals for cut in cuts(each, whole, rng)]
    rest = run(tight, again, lag=seed % 2)
    for arrival in again:
        request = arrival.request
        for choice, begun in enumerate(request.output_token_ids):
            entry = whole[request.request_id.partition("@")[0], choice]
            found = rest.get((request.request_id, choice))
            if begun is None:
                assert found is None, request
                continue
            assert found["tokens"] == entry["tokens"][len(begun) :], request
            assert found["end"] == entry["end"], request
            assert found["logprobs"] == (entry["logprobs"] and entry["logprobs"][len(begun) :]), request
    return len(again)
