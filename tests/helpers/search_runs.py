"""Searches driven without an engine: replies are a function of the prompt, and branches advance at any speed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from transect import Search
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.search.machine import Call, EndChoice, Render, RunRequest, SearchRun
from transect.search.tree import Tree
from transect.text.output_processor import Update
from transect.text.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

CONVERSATION = [{"role": "user", "content": "2+2?"}]
Reply = Callable[[str, int, int], str]
"""(prompt, choice, seed) -> the whole rest of an answer; digits in it are unlikely tokens."""


def decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


def start(search: Search, messages=CONVERSATION, judges=None, max_model_len=10_000, **params) -> SearchRun:
    params = {"max_tokens": 200, "seed": 1} | params
    text = "2+2?"
    return SearchRun(
        search, Tree(messages, text), list(text.encode()), SamplingParams(**params), seed=5,
        max_model_len=max_model_len, decode=decode, judges=judges or {},
    )  # fmt: skip


def logprob_of(token: int) -> float:
    return -3.0 if chr(token).isdigit() else -0.1


class Drive:
    """Performs a search's operations; ``speed`` picks the choices that get a token in a step."""

    def __init__(self, run: SearchRun, reply: Reply, speed: random.Random | None = None) -> None:
        self.run, self.reply, self.speed = run, reply, speed
        self.submits: list[RunRequest] = []
        self.aborts: list[EndChoice] = []
        self.left: dict[tuple[int, int], list[int]] = {}
        self.steps = 0

    def all(self) -> SearchRun:
        while not self.run.done:
            self.perform()
            if not self.run.done:
                self.step()
        self.perform()
        return self.run

    def perform(self) -> None:
        while operations := self.run.take():
            for each in operations:
                if isinstance(each, RunRequest):
                    self.submit(each)
                elif isinstance(each, EndChoice):
                    self.aborts.append(each)
                    self.left.pop((each.key, each.choice), None)
                elif isinstance(each, Render):
                    text = "".join(f"[{m['role']}]{m['content']}" for m in each.messages)
                    self.run.rendered(each.key, list(text.encode()))
                elif isinstance(each, Call):
                    self.run.judged(each.key, each.judge.function(each.question, each.answer))

    def submit(self, submit: RunRequest) -> None:
        self.submits.append(submit)
        prompt = decode(submit.prompt_token_ids)
        if submit.pooling is not None:
            import numpy as np

            pooled = np.array([float(len(prompt)), float(prompt.count("4"))]).tobytes()
            self.run.feed(submit.key, _final(submit.key, "", [0], pooled=pooled))
            return
        for choice in range(submit.params.n):
            text = self.reply(prompt, choice, submit.params.seed)
            self.left[submit.key, choice] = list(text.encode())

    def step(self) -> None:
        """Draw a token of each choice, or of some."""
        self.steps += 1
        going = list(self.left)
        assert going, "the search waits for nothing"
        if self.speed is not None:
            going = self.speed.sample(going, self.speed.randint(1, len(going)))
        for place in going:
            if place in self.left:
                self.token(*place)

    def token(self, key: int, choice: int) -> None:
        left = self.left[key, choice]
        params = next(each for each in self.submits if each.key == key).params
        drawn = left.pop(0) if left else 0
        done = self.__dict__.setdefault("done", {})
        text = done[key, choice] = done.get((key, choice), "") + (chr(drawn) if drawn else "")
        position = {drawn: Logprob(logprob_of(drawn), 1, chr(drawn))}
        update = Update(str(key), choice, chr(drawn) if drawn else "", [drawn] if drawn else [])
        update.logprobs = [position][: len(update.token_ids)] if params.logprobs is not None else None
        stopped = next((stop for stop in params.stop or () if text.endswith(stop)), None)
        if stopped is not None or not left:
            update.finish_reason, update.stop_reason = "stop", stopped
        elif len(text) >= params.max_tokens:
            update.finish_reason = "length"
        if update.finish_reason is not None:
            del self.left[key, choice]
            if params.n == 1:
                update.final = _final(key, text, [drawn], logprobs=[position]).final
        self.run.feed(key, update)


def _final(key, text, tokens, pooled=None, logprobs=None) -> Update:
    output = CompletionOutput(0, text, tokens, None, logprobs, "stop")
    final = RequestOutput(str(key), None, [], None, [output], True, 0, RequestMetrics(0.0), pooled)
    return Update(str(key), 0, final=final, finish_reason="stop")


def tree_of(run: SearchRun) -> list[tuple]:
    """All that a tree is, aside from tokens that were drawn too late to be in it."""
    assert run.result is not None
    branches = [
        (b.id, b.parent and b.parent.id, tuple(b.tokens), b.text, b.state, b.finish_reason, dict(b.scores), b.answer)
        for b in run.tree.branches
    ]
    return [*branches, run.result.branch.id, dict(run.result.votes), run.result.ended_by]
