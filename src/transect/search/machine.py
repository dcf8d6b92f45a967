"""``SearchRun``: one search as a state machine, without threads, clocks and engines.

A driver performs the operations that ``take`` returns, and reports what came of them with ``feed``, ``rendered`` and
``judged``; ``local.py`` drives an ``LLM``, ``streams.py`` an ``AsyncEngine``.

**The same tree every time.** A method sees its branches end in virtual time, which is counted in tokens: a branch that
begins at tick 10 and has 5 tokens ends at tick 15. An end is reported once every other running branch has reached that
tick, so the order does not depend on the speed of an engine, on preemption, or on a fail-over in between. Draws are a
function of (seed, choice, position), and each engine request gets a seed derived from the search's seed and its own
number. A dropped branch keeps the tokens up to the tick of its end; the few drawn later are counted as usage only. The
exception is a budget in seconds.

**Forks.** Branches that begin together at one place become one engine request with as many choices, which computes the
prompt once and shares its blocks. Branches that begin at different places share blocks through the prefix cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..engine.executors.pooling import PARAMS as POOLED
from ..engine.executors.pooling import Pooling
from ..engine.scheduling.arrivals import seed_of
from ..engine.scheduling.sampling_params import SamplingParams
from ..text.output_processor import Update
from .judges import VERDICT_PARAMS, Judge, Likelihood, ModelVerdict, Program, RewardHead, judge_of
from .prices import ForkCosts
from .result import SearchResult
from .settings import SearchSettings
from .tree import Action, Assess, Branch, Drop, Extend, Messages, Tree

MOST_IDLE = 1000
"""Times in a row that a method may yield without work for the engine."""


@dataclass(slots=True)
class RunRequest:
    """Operation: run an engine request. Its choices are the branches in ``works``, or it is for a judge."""

    key: int
    prompt_token_ids: list[int]
    params: SamplingParams
    adapter: str
    pooling: Pooling | None = None


@dataclass(frozen=True, slots=True)
class EndChoice:
    """Operation: end a choice of an engine request."""

    key: int
    choice: int


@dataclass(frozen=True, slots=True)
class Render:
    """Operation: render a conversation, and report its token ids with ``rendered``."""

    key: int
    messages: Messages


@dataclass(frozen=True, slots=True)
class Call:
    """Operation: call a judge's function, and report its score with ``judged``."""

    key: int
    judge: Program
    question: str
    answer: str


Operation = RunRequest | EndChoice | Render | Call


@dataclass(slots=True, eq=False)
class _Work:
    """A branch whose tokens are drawn, as a choice of an engine request."""

    branch: Branch
    action: Extend
    key: int
    choice: int
    start: int
    limit: str
    """Finish reason if ``max_tokens`` of the engine request is reached: "step" or "length"."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    cut: int | None = None
    """Number of tokens after which the floor is crossed; None if it is not."""

    @property
    def event(self) -> float:
        """Tick at which the branch ends; infinite while that is not known."""
        end = self.start + max(len(self.tokens), 1) if self.reason is not None else math.inf
        return end if self.cut is None else min(end, self.start + self.cut)

    @property
    def reached(self) -> float:
        """Tick up to which the branch is known."""
        return math.inf if self.reason is not None else self.start + len(self.tokens)


class SearchRun:
    """One search.

    Args:
        search: its settings.
        tree: with the conversation or the question.
        prompt_token_ids: the prompt.
        params: sampling parameters of a branch; a seed of None is replaced by ``seed``.
        seed: of the search, if the request has none.
        max_model_len: longest prompt and output together, in tokens.
        decode: text of token ids, without special tokens.
        judges: those beside the built-in ones.

    Raises:
        ValueError: the settings do not fit the request; the message names the field.
    """

    def __init__(
        self,
        search: SearchSettings,
        tree: Tree,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        max_model_len: int,
        decode: Callable[[Sequence[int]], str],
        judges: Mapping[str, Judge] | None = None,
    ) -> None:
        search.check_params(params.temperature, params.n, tree.messages is not None)
        self.search, self.tree = search, tree
        self.judges = {name: judge_of(name, judges or {}) for name in search.options.judges}
        self.seed = seed if params.seed is None else params.seed
        logprobs = params.logprobs
        if logprobs is None and (
            search.options.wants_logprobs or any(isinstance(each, Likelihood) for each in self.judges.values())
        ):
            logprobs = 0
        self.params = params.with_(logprobs=logprobs)
        self.clock = 0
        """Virtual time in tokens."""
        self.result: SearchResult | None = None
        self.drawn = 0
        """Tokens that the engine has drawn, those after the end of a dropped branch included."""
        self.costs = ForkCosts(tree, search.budget.seconds)
        self.version = 0
        """Number of changes of the tree that ``progress`` shows."""
        self._prompts: dict[int, list[int]] = {tree.root.id: list(prompt_token_ids)}
        """Prompts by the root's id."""
        self._max_model_len, self._decode = max_model_len, decode
        self._steps = search.method.steps(tree, search.options)
        self._begun, self._next_key = False, 0
        self._operations: list[Operation] = []
        self._works: dict[tuple[int, int], _Work] = {}
        """Running branches by (engine request, choice)."""
        self._held: dict[int, list[Extend]] = {}
        """Actions that wait for a prompt, by the root's id."""
        self._renders: dict[int, int | tuple[Branch, str]] = {}
        """Root, or (branch, judge's name), of each rendering that is under way."""
        self._judging: dict[int, tuple[Branch, str]] = {}
        """Branch and judge's name of each score that is under way."""
        self._error: str | None = None
        """Last error of the engine in a branch."""
        self._news: list[Branch] = []
        """Branches whose scores are known, or whose ``Extend`` had nothing to do."""
        self._pump()

    # ---- what drivers use --------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """True once the search has a result."""
        return self.result is not None

    def take(self) -> list[Operation]:
        """Return the operations to perform now, in order."""
        taken, self._operations = self._operations, []
        return taken

    def feed(self, key: int, update: Update) -> None:
        """Take an update of an engine request."""
        if key in self._judging:
            if update.final is not None:
                self._judge(key, update)
            return
        work = self._works.get((key, update.index))
        self.drawn += len(update.token_ids)
        if work is None or self.done:
            return
        before = len(work.tokens)
        work.tokens += update.token_ids
        if update.logprobs:
            work.logprobs += [
                position[token].logprob for position, token in zip(update.logprobs, update.token_ids, strict=True)
            ]
        work.texts.append(update.text)
        if work.action.floor is not None and work.cut is None:
            work.cut = work.action.floor.crossed_at(work.logprobs, before)
        if update.finish_reason is not None:
            work.reason, work.stop_reason, work.error = update.finish_reason, update.stop_reason, update.error
        self._pump()

    def rendered(self, key: int, prompt_token_ids: Sequence[int] | None) -> None:
        """Take the token ids of a rendering; None if they do not fit into the context."""
        target = self._renders.pop(key)
        if self.done:
            return
        if prompt_token_ids is None:
            self._unrendered(target)
        elif isinstance(target, tuple):
            branch, name = target
            judge = self.judges[name]
            assert isinstance(judge, ModelVerdict)
            adapter = judge.adapter or branch.root.adapter
            self._submit_judge(branch, name, list(prompt_token_ids), VERDICT_PARAMS, adapter)
        else:
            self._prompts[target] = list(prompt_token_ids)
            self._extend(self._held.pop(target, []))
        self._pump()

    def _unrendered(self, target: int | tuple[Branch, str]) -> None:
        """Leave a judged branch without a score, or drop branches, if their conversation exceeds the context."""
        if isinstance(target, tuple):
            target[0].scores[target[1]] = None
            self._news.append(target[0])
            return
        for action in self._held.pop(target):
            action.branch.state, action.branch.finish_reason = "dropped", "length"
            self._news.append(action.branch)

    def judged(self, key: int, score: float | None) -> None:
        """Take the score of a ``Call``; None if the function has failed."""
        branch, name = self._judging.pop(key)
        branch.scores[name] = None if score is None or not math.isfinite(score) else float(score)
        self._news.append(branch)
        self._pump()

    def end(self) -> None:
        """End the search now, because its seconds are spent."""
        if not self.done:
            self._cut(None)
            self._finish("seconds")

    def progress(self) -> dict[str, Any]:
        """Return counts for a stream: branches by state, tokens, votes."""
        states = [branch.state for branch in self.tree.branches]
        votes = self.search.method.votes
        counts = {state: states.count(state) for state in ("alive", "ended", "dropped")}
        voted = {} if votes is None else {"votes": dict(votes(self.tree, self.search.options))}
        return {"method": self.search.method.name, **counts, "tokens": self.drawn, **voted}

    @property
    def running(self) -> dict[int, int]:
        """Number of tokens drawn so far for each running branch, by its id; ``Branch.tokens`` gets them at its end."""
        return {work.branch.id: len(work.tokens) for work in self._works.values()}

    # ---- virtual time ------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Advance the virtual clock as far as the known tokens allow, and the method with it."""
        idle = 0
        while not self.done and not self._renders and not self._judging:
            if self._news or not self._works:
                news, self._news = sorted(self._news, key=lambda branch: branch.id), []
                idle = 0 if news else idle + 1
                if idle > MOST_IDLE:
                    raise RuntimeError(f"the search {self.search.method.name} does nothing: it waits for no branch")
                self._resume(news)
                continue
            event = min(work.event for work in self._works.values())
            budget = self._budget_tick()
            tick = min(event, budget)
            if tick > min(work.reached for work in self._works.values()) or tick == math.inf:
                return
            self.clock = int(tick)
            if event > budget:
                self._cut("length")
                self._finish("tokens")
                return
            for work in sorted(self._works.values(), key=lambda work: work.branch.id):
                if work.event <= tick:
                    self._end(work)
                    self._news.append(work.branch)

    def _budget_tick(self) -> float:
        """Return the tick at which the budget of tokens is spent if no branch ends before."""
        most = self.search.budget.tokens
        if most is None:
            return math.inf
        spent = self.tree.tokens + sum(self.clock - work.start for work in self._works.values())
        return self.clock + max(math.ceil((most - spent) / len(self._works)), 0)

    def _resume(self, news: list[Branch]) -> None:
        try:
            actions = self._steps.send(news) if self._begun else next(self._steps)
        except StopIteration:
            self._finish("cost" if self.costs.too_dear else "method")
            return
        finally:
            self._begun = True
        self._start(actions)

    def _start(self, actions: Sequence[Action]) -> None:
        self.version += 1
        for action in actions:
            if isinstance(action, Drop):
                self._drop(action.branch)
        for action in actions:
            if isinstance(action, Assess):
                self._score(action)
        self._extend([action for action in actions if isinstance(action, Extend)])

    # ---- actions -----------------------------------------------------------------------------------------------------

    def _extend(self, actions: Sequence[Extend]) -> None:
        """Start engine requests. Those that begin at one place with equal settings are choices of one request."""
        groups: dict[Any, list[Extend]] = {}
        for number, action in enumerate(actions):
            branch = action.branch
            root = branch.root
            if root.id not in self._prompts:
                held = self._held.setdefault(root.id, [])
                if not held:
                    key = self._key()
                    self._renders[key] = root.id
                    assert root.messages is not None
                    self._operations.append(Render(key, root.messages))
                held.append(action)
                continue
            place = ("alone", number) if branch.tokens else ("together", id(branch.parent))
            settings = branch.adapter, action.max_tokens, action.stop, action.floor, action.greedy
            groups.setdefault((root.id, place, *settings), []).append(action)
        for group in groups.values():
            self._submit(group)

    def _submit(self, group: Sequence[Extend]) -> None:
        first = group[0]
        branch = first.branch
        before = branch.all_tokens
        prompt = [*self._prompts[branch.root.id], *before]
        room = self._max_model_len - len(prompt)
        if self.params.max_tokens is not None:
            room = min(room, self.params.max_tokens - len(before))
        if room < 1:
            for action in group:
                action.branch.state, action.branch.finish_reason = "dropped", "length"
                self._news.append(action.branch)
            return
        most = room if first.max_tokens is None else min(first.max_tokens, room)
        changes: dict[str, Any] = {"max_tokens": most, "n": len(group)}
        key = self._key()
        changes["seed"] = seed_of(self.seed, key)
        changes["min_tokens"] = min(max(self.params.min_tokens - len(before), 0), most)
        if first.stop:
            changes["stop"] = [*(self.params.stop or ()), *first.stop]
            changes["include_stop_str_in_output"] = True
        if first.greedy:
            changes["temperature"] = 0.0
        if first.floor is not None and self.params.logprobs is None:
            changes["logprobs"] = 0
        for choice, action in enumerate(group):
            action.branch.state = "alive"
            limit = "length" if most == room else "step"
            self._works[key, choice] = _Work(action.branch, action, key, choice, self.clock, limit)
        self._operations.append(RunRequest(key, prompt, self.params.with_(**changes), branch.adapter))

    def _drop(self, branch: Branch) -> None:
        """End a branch at the current tick."""
        work = next((each for each in self._works.values() if each.branch is branch), None)
        if work is not None:
            self._keep(work, self.clock - work.start)
            self._release(work)
        if not branch.complete:
            branch.state = "dropped"

    def _score(self, action: Assess) -> None:
        branch, name = action.branch, action.by
        judge = self.judges[name]
        if isinstance(judge, Likelihood):
            branch.scores[name] = branch.mean_logprob
            self._news.append(branch)
        elif isinstance(judge, Program):
            key = self._key()
            self._judging[key] = branch, name
            answer = self.tree.answer_of(branch)
            self._operations.append(Call(key, judge, self.tree.question, answer))
        elif isinstance(judge, RewardHead):
            prompt = [*self._prompts[branch.root.id], *branch.all_tokens]
            adapter = judge.adapter or branch.root.adapter
            self._submit_judge(branch, name, prompt, POOLED, adapter, "last")
        else:
            key = self._key()
            self._renders[key] = branch, name
            answer = self.tree.answer_of(branch)
            self._operations.append(Render(key, judge.messages(self.tree.messages, self.tree.question, answer)))

    def _submit_judge(
        self,
        branch: Branch,
        name: str,
        prompt: list[int],
        params: SamplingParams,
        adapter: str,
        pooling: Pooling | None = None,
    ) -> None:
        if len(prompt) >= self._max_model_len:  # no room for the judge: no score
            branch.scores[name] = None
            self._news.append(branch)
            return
        key = self._key()
        self._judging[key] = branch, name
        self._operations.append(RunRequest(key, prompt, params, adapter, pooling))

    def _judge(self, key: int, update: Update) -> None:
        """Read the score from a judge's finished engine request."""
        _, name = self._judging[key]
        judge, final = self.judges[name], update.final
        assert final is not None
        score: float | None = None
        if isinstance(judge, RewardHead) and final.pooled is not None:
            score = judge.score(final.pooled)
        elif isinstance(judge, ModelVerdict) and final.outputs[0].logprobs:
            score = judge.score(final.outputs[0].logprobs[0])
        self.judged(key, score)

    # ---- ends --------------------------------------------------------------------------------------------------------

    def _end(self, work: _Work) -> None:
        """Move the tokens of a branch's engine request to the branch, and end the request's work for it."""
        branch, action = work.branch, work.action
        if work.cut is not None and work.event == work.start + work.cut:
            self._keep(work, work.cut)
            branch.state = "dropped"
            self._release(work)
            return
        del self._works[work.key, work.choice]
        branch.tokens += work.tokens
        branch.logprobs += work.logprobs
        reason, stop_reason, text = work.reason, work.stop_reason, "".join(work.texts)
        if action.stop and isinstance(stop_reason, str):
            if stop_reason in action.stop:
                reason, text = "step", self._decode(work.tokens)
            elif not self.params.include_stop_str_in_output:
                text = text.removesuffix(stop_reason)
        elif reason == "length":
            reason = work.limit
        branch.text += text
        branch.state = "ended" if work.error is None else "dropped"
        branch.finish_reason, branch.stop_reason = reason, stop_reason
        self._error = work.error or self._error

    def _keep(self, work: _Work, count: int) -> None:
        """Move the first ``count`` drawn tokens to the branch."""
        kept = work.tokens[:count]
        work.branch.tokens += kept
        work.branch.logprobs += work.logprobs[:count]
        work.branch.text += self._decode(kept)

    def _release(self, work: _Work) -> None:
        """Stop drawing a branch."""
        del self._works[work.key, work.choice]
        if work.reason is None:
            self._operations.append(EndChoice(work.key, work.choice))

    def _cut(self, reason: str | None) -> None:
        """End all running branches where they are. ``reason``: their finish reason; with None they keep all tokens."""
        for work in list(self._works.values()):
            self._keep(work, self.clock - work.start if reason is not None else len(work.tokens))
            work.branch.state, work.branch.finish_reason = "ended", "step"
            self._release(work)

    def _finish(self, ended_by: str) -> None:
        """Choose the answer."""
        self._steps.close()
        for branch in self.tree.alive:
            self._drop(branch)
        self.version += 1
        candidates = self.tree.answers()
        if not candidates:
            reason = self._error or "its budget was spent before a branch had a token"
            raise ValueError(f"the search {self.search.method.name} has no answer: {reason}")
        chosen = self.search.method.choose(self.tree, self.search.options)
        if chosen.finish_reason in (None, "step"):
            chosen.finish_reason = "length"
        costs = self.costs.to_list()
        self.result = SearchResult(self.search, self.tree, chosen, self.seed, self.drawn, ended_by, costs)

    def _key(self) -> int:
        self._next_key += 1
        return self._next_key - 1
