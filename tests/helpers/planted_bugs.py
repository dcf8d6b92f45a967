"""Classic bugs of schedulers and KV caches. Each is the shipping class with one method wrong."""

import dataclasses
from collections import Counter

import msgspec
from kv_checker import CheckedCache

from transect.engine.scheduling.outputs import EngineOutput
from transect.engine.scheduling.request import Request, Sequence, Status
from transect.engine.scheduling.scheduler import Scheduler
from transect.engine.scheduling.sequence_blocks import SequenceBlocks


class WritesSharedBlocks(SequenceBlocks):
    """No copy-on-write: choices of a request write into the block they share."""

    def owns_shared_block(self, seq: Sequence) -> bool:
        return True


class FreesUnderTheStepInFlight(SequenceBlocks):
    """Blocks are given back while a step that uses them is in flight."""

    def release(self, seq: Sequence) -> None:
        seq.last_step = 0
        super().release(seq)


class FreesTheSourceOfACopy(SequenceBlocks):
    """The source of a planned copy is given back before the copy has run."""

    def copy_shared_block(self, seq: Sequence, step: int) -> tuple[int, int] | None:
        copy = super().copy_shared_block(seq, step)
        if copy is not None:
            self.step_done_early(step, copy[0])
        return copy

    def step_done_early(self, step: int, source: int) -> None:
        self._after_step[step].remove([source])
        self._copies_of_step[step].remove(source)
        self._copy_sources -= Counter([source])
        self.cache.release([source])


class HashesPartialBlocks(Scheduler):
    """A block is registered when all its tokens are known, although the KV of only some of them is computed."""

    def commit(self, batch, result) -> list[EngineOutput]:
        outputs = super().commit(batch, result)
        for row in batch.rows:
            for seq in self.running:
                if seq.seq_id == row.seq_id:
                    block_end = -(-row.end // self.config.block_size) * self.config.block_size
                    self.blocks.register(seq, min(block_end, len(row.prompt_token_ids)))
        return outputs


class HashesBeforeTheStepIsDone(SequenceBlocks):
    """The prompt's blocks are findable as soon as they are planned."""

    def place(self, seq: Sequence, cached: list[int]) -> None:
        super().place(seq, cached)
        self.register(seq, seq.length)


class ForgetsReferenceOnHit(CheckedCache):
    """A cached block that is in use already does not count its next user."""

    def share(self, block_ids) -> None:
        for block_id in block_ids:
            if self._refs[block_id] == 0:
                super().share([block_id])


class EvictsWithoutForgetting(CheckedCache):
    """A block is taken for new contents, but the prefix cache still finds it under the old ones."""

    def _unregister(self, block_id: int) -> None:
        pass


class ForksWithoutReferences(SequenceBlocks):
    """Choices use the prompt's blocks without being counted."""

    def fork(self, leader: Sequence, choice: Sequence) -> None:
        super().fork(leader, choice)
        self.cache.release(choice.block_ids)


class TrustsTheWholePrompt(SequenceBlocks):
    """Prefix hashes that leave out what came before the block."""

    def _extend_hashes(self, seq: Sequence, num_blocks: int) -> None:
        for i in range(len(seq.block_hashes), num_blocks):
            start = i * self.block_size
            seq.block_hashes.append(repr(seq.tokens(start, start + self.block_size)).encode())


class LeaksOnPreemption(Scheduler):
    """A preempted sequence keeps its blocks and gets new ones later."""

    def _preempt(self, seq: Sequence) -> None:
        seq.block_ids = []
        super()._preempt(seq)


class ForgetsOutputOnPreemption(Scheduler):
    """A preempted sequence begins again from its prompt."""

    def _preempt(self, seq: Sequence) -> None:
        super()._preempt(seq)
        seq.output_token_ids.clear()
        seq.length = seq.prompt_len


class NeverPreempts(Scheduler):
    """A sequence without room waits for others to end."""

    def _preempt(self, seq: Sequence) -> None:
        pass

    def _make_room(self, seq, end, plan) -> bool:
        if seq.shared_block is None and end > len(seq.block_ids) * self.config.block_size:
            return self.blocks.grow(seq)
        return super()._make_room(seq, end, plan)


class DrawsOneTokenTooMany(Scheduler):
    """max_tokens and the context length are off by one."""

    def add(self, request: Request) -> None:
        super().add(request)
        for choice in self.requests[request.request_id].choices:
            choice.max_length += 1


class RunsOnAfterTheEnd(Scheduler):
    """The step that was under way when a choice ended is not thrown away."""

    def commit(self, batch, result) -> list[EngineOutput]:
        outputs = super().commit(batch, result)
        for row, seq in ((row, self._seen.get(row.seq_id)) for row in batch.rows):
            if seq is not None and row.draws and seq.finish_reason == "stop" and row.seq_id in result.tokens:
                outputs.append(EngineOutput(seq.request.spec.request_id, seq.index, [result.tokens[row.seq_id]]))
        self._seen = {s.seq_id: s for s in self._seen.values() if s.finish_reason is None}
        self._seen.update({seq.seq_id: seq for seq in self.running})
        return outputs

    def __init__(self, config, clock) -> None:
        super().__init__(config, clock)
        self._seen: dict[int, Sequence] = {}


class LosesAbortedRequests(Scheduler):
    """An abort while the sequence waits tells nobody."""

    def abort(self, request_id: str, choice: int | None = None) -> list[EngineOutput]:
        state = self.requests.get(request_id)
        waiting = state is not None and state.leader.status is Status.WAITING
        outputs = super().abort(request_id, choice)
        return [] if waiting else outputs


class EndsTwice(Scheduler):
    """Two last outputs for an aborted choice."""

    def abort(self, request_id: str, choice: int | None = None) -> list[EngineOutput]:
        return super().abort(request_id, choice) * 2


class LetsSmallOnesOvertake(Scheduler):
    """When the queue's head does not fit, the next one is tried."""

    def _admit(self, spare, plan) -> None:
        super()._admit(spare, plan)
        head = self.waiting.head()
        if head is not None and head.request.first_scheduled is None and self.waiting.num_new > 1:
            self.waiting.remove(head)
            super()._admit(spare - sum(row.num_tokens for row in plan.rows), plan)
            self.waiting.push(head)


class LetsDecodesWait(Scheduler):
    """Prompts fill a step up as if nobody decoded beside them."""

    def __init__(self, config, clock) -> None:
        super().__init__(config, clock)
        self.budget._mixed = config.max_num_batched_tokens


class SharesOneGrammar(Scheduler):
    """The choices of a request move one grammar on together."""

    def add(self, request: Request) -> None:
        super().add(request)
        first, *others = self.requests[request.request_id].choices
        for choice in others:
            choice.constraint = first.constraint
            choice.draws = (msgspec.structs.replace(choice.draws[0], constraint=first.constraint),)


class TellsGrammarsTooLate(Scheduler):
    """A grammar learns of a token only when the next step has been planned, after its mask was made."""

    def __init__(self, config, clock) -> None:
        super().__init__(config, clock)
        self._late: list[tuple] = []

    def schedule(self):
        batch = super().schedule()
        for accept, token in self._late:
            accept(token)
        self._late = []
        return batch

    def _advance(self, choice, result, now) -> EngineOutput:
        grammar = choice.constraint
        if grammar is None or grammar.terminated:
            return super()._advance(choice, result, now)
        self._late.append((grammar.accept, result.tokens[choice.seq_id]))
        choice.constraint = None
        output = super()._advance(choice, result, now)
        choice.constraint = grammar
        return output


class TakesNothingBack(Scheduler):
    """Steps that raised stay in flight."""

    def take_back(self, reason: str) -> list[EngineOutput]:
        return []


class KeepsTheBlocksOfBrokenSteps(Scheduler):
    """Steps that raised are forgotten, but their sequences run on as if they had been computed."""

    def take_back(self, reason: str) -> list[EngineOutput]:
        for batch, _ in self._in_flight:
            self.blocks.step_done(batch.step)
        self._in_flight.clear()
        return []


class FindsThePrefixesOfBrokenSteps(SequenceBlocks):
    """All blocks are free after a step was taken back, but their contents can still be found."""

    def reset(self, step: int) -> None:
        cache = self.cache
        kept = dict(cache._hash_of), dict(cache._block_of)
        super().reset(step)
        cache._hash_of, cache._block_of = kept
        cache._unused.update(dict.fromkeys(kept[0]))
        cache._blank = [block_id for block_id in cache._blank if block_id not in kept[0]]


class TrustsWhatAPreemptedSequenceLeft(CheckedCache):
    """KV that was not finite stays findable where its sequence has given its blocks back meanwhile."""

    def forget(self, block_ids) -> None:
        super().forget([block_id for block_id in block_ids if self._refs[block_id]])


class SaysAgainWithoutTurns(Scheduler):
    """A pipeline's step is called one more of the same, although a sequence had another turn between."""

    def schedule(self):
        before = self._last[0] if len(self._last) == self.config.pipeline_depth else None
        batch = super().schedule()
        if batch is None or before != self._last[-1]:
            return batch
        if any(row.num_tokens > 1 or len(row.draws) != 1 for row in batch.rows):
            return batch
        batch = dataclasses.replace(batch, again=True)
        self._in_flight[-1] = batch, self._in_flight[-1][1]
        return batch


MUTANTS = [
    {"blocks_class": WritesSharedBlocks},
    {"blocks_class": FreesUnderTheStepInFlight},
    {"blocks_class": FreesTheSourceOfACopy},
    {"scheduler_class": HashesPartialBlocks},
    {"blocks_class": HashesBeforeTheStepIsDone},
    {"cache_class": ForgetsReferenceOnHit},
    {"cache_class": EvictsWithoutForgetting},
    {"blocks_class": ForksWithoutReferences},
    {"blocks_class": TrustsTheWholePrompt},
    {"scheduler_class": LeaksOnPreemption},
    {"scheduler_class": ForgetsOutputOnPreemption},
    {"scheduler_class": NeverPreempts},
    {"scheduler_class": DrawsOneTokenTooMany},
    {"scheduler_class": RunsOnAfterTheEnd},
    {"scheduler_class": LosesAbortedRequests},
    {"scheduler_class": EndsTwice},
    {"scheduler_class": LetsSmallOnesOvertake},
    {"scheduler_class": LetsDecodesWait},
    {"scheduler_class": SharesOneGrammar},
    {"scheduler_class": TellsGrammarsTooLate},
    {"scheduler_class": TakesNothingBack},
    {"scheduler_class": KeepsTheBlocksOfBrokenSteps},
    {"blocks_class": FindsThePrefixesOfBrokenSteps},
    {"cache_class": TrustsWhatAPreemptedSequenceLeft},
    {"scheduler_class": SaysAgainWithoutTurns},
]


def name_of(mutant: dict[str, type]) -> str:
    """The name of the class with the bug."""
    return next(iter(mutant.values())).__name__
