"""A stand-in for the device that knows what every KV slot holds, and complains about each wrong one.

A slot holds no numbers but the *chain* of the prefix whose last token was written there: a hash of all tokens up to and
including that one. Two slots with equal chains would hold equal keys and values in a real cache. So a row may read a
slot exactly when its chain is that of the row's own prefix, whoever wrote it. Slots of blocks that are given back, and
of blocks newly taken, are poisoned.

The tokens that this device draws are a function of seed, choice and prefix, so what a request must yield is known
without any scheduler (``draw_token``), and each sequence's true tokens are kept here, apart from the scheduler's lists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from grammar_fakes import Steps, allowed_after

from transect.engine.scheduling.batch import PLACEHOLDER, Draw, ScheduledBatch, ScheduledRow, StepResult, TokenLogprobs
from transect.engine.scheduling.kv_cache import KVCache
from transect.engine.scheduling.scheduler_config import SchedulerConfig

VOCAB = 8
_ROOT = 0x5EED
_POISON = -1


class Violation(AssertionError):
    """The scheduler broke a promise."""


class Broken(RuntimeError):
    """The device failed as planned."""


def check(condition: bool, message: str) -> None:
    if not condition:
        raise Violation(message)


def extend_chain(chain: int, token: int) -> int:
    """The chain of a prefix with one more token."""
    return hash((chain, token, 7919))


def chain_of(tokens: Sequence[int]) -> int:
    chain = _ROOT
    for token in tokens:
        chain = extend_chain(chain, token)
    return chain


def draw_token(seed: int, choice: int, chain: int, masked: Collection[int]) -> int:
    """The token that follows the prefix with this chain, for a choice of a request with this seed."""
    token = hash((seed, choice, chain)) % VOCAB
    for _ in range(VOCAB):
        if token not in masked:
            break
        token = (token + 1) % VOCAB
    return token


class CheckedCache(KVCache):
    """The shipping cache, which reports blocks whose contents nobody may read any more."""

    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool = True) -> None:
        self.on_garbage: Callable[[int], None] = lambda block_id: None
        super().__init__(num_blocks, enable_prefix_caching=enable_prefix_caching)

    def reset(self) -> None:
        super().reset()
        for block_id in range(self.num_blocks):
            self.on_garbage(block_id)

    def forget(self, block_ids: Iterable[int]) -> None:
        ids = list(block_ids)
        free = [block_id for block_id in ids if block_id in self._unused]
        super().forget(ids)
        for block_id in free:
            self.on_garbage(block_id)

    def allocate(self) -> int | None:
        block_id = super().allocate()
        if block_id is not None:
            self.on_garbage(block_id)
        return block_id

    def release(self, block_ids: Sequence[int]) -> None:
        super().release(block_ids)
        for block_id in block_ids:
            if self._refs[block_id] == 0 and block_id not in self._unused:
                self.on_garbage(block_id)


class _Truth:
    """The real tokens of one sequence and the chains of its prefixes."""

    def __init__(self, prompt: tuple[int, ...], begun: Sequence[int] = ()) -> None:
        self.prompt_len = len(prompt)
        self.tokens: list[int] = []
        self.chains: list[int] = []
        self.taken_in: Sequence[int] = begun
        """The engine's live list of output tokens."""
        self.failed = False
        self.grammar: Steps | None = None
        for token in (*prompt, *begun):
            self.append(token)

    def append(self, token: int) -> None:
        self.chains.append(extend_chain(self.chains[-1] if self.chains else _ROOT, token))
        self.tokens.append(token)


class CheckingExecutor:
    """Runs batches like a device, in order, and raises ``Violation`` at the first thing that is not as it must be.

    Args:
        config: of the scheduler, for its limits.
        late: compute a batch only when its result is asked for, which is after the next one was submitted when the
            engine runs one step ahead; otherwise on submission.
        fails: (seq_id, position) -> error message or None, for draws (position of the token) and for prompt chunks
            without draws (position of the chunk's last token).
        on_submit: called while the batch is in flight.
        ended: seq_id -> whether the sequence has ended; what is still drawn for it is thrown away.
        breaks: (step, where) -> the exception to raise there, or None; ``where`` is "submit" (before anything is done),
            "submitted" (the device is at work), "draw" or "result".
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        late: bool,
        fails: Callable[[int, int], str | None] = lambda seq_id, position: None,
        on_submit: Callable[[], None] = lambda: None,
        ended: Callable[[int], bool] = lambda seq_id: False,
        breaks: Callable[[int, str], BaseException | None] = lambda step, where: None,
    ) -> None:
        self.config = config
        self.late = late
        self.fails = fails
        self.on_submit = on_submit
        self.ended = ended
        self.breaks = breaks
        self.slots = [[_POISON] * config.block_size for _ in range(config.num_blocks)]
        self.suspect: dict[int, set[int]] = {}
        """Blocks from which nothing finite could be computed, and the sequences that had them when that was told: no
        other may read them."""
        self.holders: Callable[[int], set[int]] | None = None
        """Block -> the seq_ids that have it now; None: suspect blocks are not followed."""
        self.truths: dict[int, _Truth] = {}
        self.begun: dict[int, tuple[int, ...]] = {}
        """By seq_id the output tokens that a continued choice had from the start."""
        self.done_step = self.newest_step = 0
        self.past: deque[ScheduledBatch] = deque(maxlen=config.pipeline_depth)
        self.num_copies = 0
        self.num_forced = 0
        self.last_draws: set[int] = set()
        self.last_lists: dict[int, list[int]] = {}

    def poison(self, block_id: int) -> None:
        """Nobody may read what the block held."""
        self.slots[block_id] = [_POISON] * self.config.block_size
        self.suspect.pop(block_id, None)

    def submit(self, batch: ScheduledBatch) -> _Handle:
        self.newest_step = batch.step
        self._break(batch.step, "submit")
        self._check_limits(batch)
        self._check_again(batch)
        handle = _Handle(self, batch)
        if not self.late and not handle.constrained:
            handle.run()
        self._break(batch.step, "submitted")
        self.on_submit()
        return handle

    def abandon(self) -> None:
        """Forget tokens that the engine has not taken in: they will be drawn again."""
        for seq_id, truth in self.truths.items():
            known = truth.prompt_len + len(truth.taken_in)
            del truth.tokens[known:], truth.chains[known:]
            truth.failed = truth.failed and self.ended(seq_id)
        self.past.clear()
        self.last_draws = set()
        self.done_step = self.newest_step

    def _break(self, step: int, where: str) -> None:
        error = self.breaks(step, where)
        if error is not None:
            raise error

    def _check_again(self, batch: ScheduledBatch) -> None:
        """``ScheduledBatch.again`` is said only of what it is true of."""
        before = self.past[0] if len(self.past) == self.config.pipeline_depth else None
        self.past.append(batch)
        if not batch.again:
            return
        check(before is not None and len(before.rows) == len(batch.rows), f"step {batch.step} is new")
        assert before is not None
        for row, old in zip(batch.rows, before.rows, strict=True):
            check(row.seq_id == old.seq_id and row.num_tokens == len(row.draws) == 1, "again, with other rows")
            check(row.start == old.end, f"again, but sequence {row.seq_id} goes on at {row.start}, not {old.end}")
            same = row.block_ids is old.block_ids and row.output_token_ids is old.output_token_ids
            check(same, "again, in other lists")

    def _check_limits(self, batch: ScheduledBatch) -> None:
        config = self.config
        check(bool(batch.rows), "a batch without rows")
        check(batch.num_tokens <= config.max_num_batched_tokens, f"{batch.num_tokens} tokens exceed the budget")
        drafts = sum(len(row.drafts) for row in batch.rows)
        check(not drafts or len(batch.rows) + drafts <= config.max_rows, f"{drafts} drafts are too many rows")
        decodes = any(
            row.draws
            and row.num_tokens - len(row.drafts) == 1
            and row.seq_id in self.last_draws
            and self.last_lists.get(row.seq_id, row.block_ids) is row.block_ids  # else it was admitted anew
            for row in batch.rows
        )
        mixed = config.max_mixed_tokens or config.max_num_batched_tokens
        check(not decodes or batch.num_tokens <= mixed, f"{batch.num_tokens} tokens beside decodes exceed their budget")
        self.last_draws = {draw.seq_id for row in batch.rows for draw in row.draws}
        self.last_lists = {row.seq_id: row.block_ids for row in batch.rows if row.draws}
        check(len(batch.rows) <= config.max_num_seqs, f"{len(batch.rows)} rows exceed max_num_seqs")
        check(len({row.seq_id for row in batch.rows}) == len(batch.rows), "a sequence has two rows in one batch")
        for row in batch.rows:
            check(row.num_tokens >= 1, "an empty row")
            known = row.num_tokens - len(row.drafts)
            check(not row.drafts or (known == 1 and len(row.draws) == 1), "drafts of a row that does not decode")
            chunk = config.max_prefill_chunk
            check(chunk is None or known <= chunk, f"{row.num_tokens} tokens exceed max_prefill_chunk")

    def masks(self, batch: ScheduledBatch) -> dict[int, frozenset[int]]:
        """What the grammars allow, by seq_id. They must stand right before the tokens to draw."""
        found = {}
        for row in batch.rows:
            for draw in row.draws:
                grammar = draw.constraint
                if isinstance(grammar, Steps):
                    before = row.known_end - len(draw.prompt_token_ids)
                    known = len(grammar.accepted)
                    if known > before:  # the grammar has forced this token meanwhile; nobody waits for the draw
                        only = allowed_after(
                            grammar.seed, grammar.vocab, grammar.accepted[:before], grammar.end, grammar.forcing
                        )
                        check(len(only) == 1 and known > before + 1, f"a draw for {before} after {grammar.accepted}")
                        found[draw.seq_id] = only
                        continue
                    check(self.ended(draw.seq_id) or known == before, f"a mask after {grammar.accepted}, not {before}")
                    found[draw.seq_id] = grammar.allowed()
        return found

    def execute(self, batch: ScheduledBatch, masks: dict[int, frozenset[int]]) -> StepResult:
        """Copy, write, read, draw."""
        self._masks = masks
        check(batch.step == self.done_step + 1, f"step {batch.step} runs after step {self.done_step}")
        self.done_step = batch.step
        self._copy(batch.block_copies)
        written: set[tuple[int, int]] = set()
        for row in batch.rows:
            self._write(row, written)
        result = StepResult({})
        for row in batch.rows:
            self._read(row)
            self._draw(row, result)
        return result

    def _copy(self, copies: tuple[tuple[int, int], ...]) -> None:
        sources, targets = {s for s, _ in copies}, [t for _, t in copies]
        check(not sources.intersection(targets), "a block is source and destination of copies")
        check(len(set(targets)) == len(targets), "two copies into one block")
        for source, target in copies:
            self.poison(target)
            self.slots[target] = list(self.slots[source])
            if source in self.suspect:
                self.suspect[target] = self.suspect[source]
        self.num_copies += len(copies)

    def _truth(self, seq_id: int, prompt: tuple[int, ...]) -> _Truth:
        if seq_id not in self.truths:
            self.truths[seq_id] = _Truth(prompt, self.begun.get(seq_id, ()))
        return self.truths[seq_id]

    def _write(self, row: ScheduledRow, written: set[tuple[int, int]]) -> None:
        truth = self._truth(row.seq_id, row.prompt_token_ids)
        size = self.config.block_size
        check(len(row.block_ids) >= row.num_blocks(size), f"sequence {row.seq_id} has too few blocks")
        self._take_forced(row, truth)
        check(truth.failed or row.known_end <= len(truth.tokens), f"sequence {row.seq_id} runs past its tokens")
        if truth.failed:  # the step after a failed draw was under way; what it writes must not be read by anybody
            for position in range(row.start, row.end):
                self.slots[row.block_ids[position // size]][position % size] = _POISON
            return
        tokens = row.token_ids
        check(len(tokens) == row.num_tokens, "token_ids and num_tokens disagree")
        chains = self._chains(row, truth)
        for position, token in zip(range(row.start, row.end), tokens, strict=True):
            if position < row.known_end:
                true = truth.tokens[position]
                waited = token == PLACEHOLDER and position == len(truth.tokens) - 1 and not row.drafts
                check(
                    token == true or waited,
                    f"sequence {row.seq_id} is given token {token} at position {position}, but drew {true}",
                )
            slot = (row.block_ids[position // size], position % size)
            check(slot not in written, f"slot {slot} is written twice in a step")
            written.add(slot)
            self.slots[slot[0]][slot[1]] = chains[position]

    @staticmethod
    def _chains(row: ScheduledRow, truth: _Truth) -> list[int]:
        """The chains that the row's slots must have, those of its drafts last."""
        chains = truth.chains[: row.known_end]
        for draft in row.drafts:
            chains.append(extend_chain(chains[-1], draft))
        return chains

    def _take_forced(self, row: ScheduledRow, truth: _Truth) -> None:
        """Tokens that nobody drew: the grammar must leave no other."""
        known = row.output_token_ids[: row.end - truth.prompt_len]
        grammar = truth.grammar
        while grammar is not None and not truth.failed and len(truth.tokens) - truth.prompt_len < len(known):
            before = truth.tokens[truth.prompt_len :]
            token = known[len(before)]
            only = allowed_after(grammar.seed, grammar.vocab, before, grammar.end, grammar.forcing)
            check(only == {token}, f"{token} was not drawn after {before}, where {sorted(only)} may come")
            truth.append(token)
            self.num_forced += 1

    def _read(self, row: ScheduledRow) -> None:
        truth = self.truths[row.seq_id]
        if truth.failed:
            return
        size = self.config.block_size
        held: list[int] = []
        for block_id in row.block_ids[: row.num_blocks(size)]:
            held += self.slots[block_id]
        chains = self._chains(row, truth)
        if held[: row.end] != chains:
            wrong = next(p for p in range(row.end) if held[p] != chains[p])
            what = "freed or never written" if held[wrong] == _POISON else "written by another prefix"
            block_id = row.block_ids[wrong // size]
            raise Violation(f"sequence {row.seq_id} reads position {wrong} from block {block_id}, which was {what}")
        for block_id in row.block_ids[: row.num_blocks(size)] if self.suspect else ():
            known = block_id not in self.suspect or row.seq_id in self.suspect[block_id]
            check(known, f"sequence {row.seq_id} reads block {block_id}, of which was told that it is not finite")

    def _draw(self, row: ScheduledRow, result: StepResult) -> None:
        if row.prompt_logprobs is not None:
            result.prompt_logprobs[row.seq_id] = tuple(
                TokenLogprobs(row.prompt_token_ids[position], -float(position), 1) for position in row.scored
            )
        if not row.draws and (error := self.fails(row.seq_id, row.end - 1)) is not None:
            result.errors[row.seq_id] = error
        for draw in row.draws:
            self._draw_one(row, draw, result)

    def told(self, batch: ScheduledBatch, result: StepResult) -> None:
        """The engine gets a result: from now on it knows which KV is not finite."""
        for row in batch.rows if self.holders is not None else ():
            ids = [draw.seq_id for draw in row.draws] or [row.seq_id]
            if all(seq_id in result.errors for seq_id in ids) and not all(map(self.ended, ids)):
                for block_id in row.block_ids[: row.num_blocks(self.config.block_size)]:
                    self.suspect[block_id] = self.holders(block_id) | {row.seq_id}

    def _draw_one(self, row: ScheduledRow, draw: Draw, result: StepResult) -> None:
        truth = self._truth(draw.seq_id, draw.prompt_token_ids)
        truth.taken_in = draw.output_token_ids
        truth.grammar = draw.constraint if isinstance(draw.constraint, Steps) else None
        if not truth.failed:
            check(row.known_end == len(truth.tokens), f"sequence {draw.seq_id} draws for {row.known_end} again")
            known = draw.output_token_ids[: row.known_end - truth.prompt_len]
            check(known == truth.tokens[truth.prompt_len :][: len(known)], "output_token_ids are not what was drawn")
            lag = row.known_end - truth.prompt_len - len(known)
            check(lag <= (0 if row.drafts else 1), "output_token_ids lag by too many tokens")
        if row.drafts:
            result.accepted[draw.seq_id], result.accepted_logprobs[draw.seq_id] = [], []
        for position in range(row.known_end, row.end + 1):
            error = "after a failure" if truth.failed else self.fails(draw.seq_id, position)
            if error is not None:
                truth.failed = True
                result.errors[draw.seq_id] = error
                return
            token = self._token(draw, truth, position, position == row.known_end)
            truth.append(token)
            logprobs = None if draw.params.logprobs is None else TokenLogprobs(token, -float(position), 1)
            if position == row.end or row.drafts[position - row.known_end] != token:
                result.tokens[draw.seq_id] = token
                if logprobs is not None:
                    result.logprobs[draw.seq_id] = logprobs
                return
            result.accepted[draw.seq_id].append(token)
            if logprobs is not None:
                result.accepted_logprobs[draw.seq_id].append(logprobs)

    def _token(self, draw: Draw, truth: _Truth, position: int, first: bool) -> int:
        masked = set(draw.masked_at(position))
        grammar = draw.constraint
        if grammar is not None and first:
            masked.update(set(range(VOCAB)) - self._masks[draw.seq_id])
        elif isinstance(grammar, Steps):
            before = truth.tokens[truth.prompt_len :]
            allowed = allowed_after(grammar.seed, grammar.vocab, before, grammar.end, grammar.forcing)
            masked.update(set(range(VOCAB)) - set(allowed))
        return draw_token(draw.seed, draw.choice, truth.chains[position - 1], masked)


class DraftingExecutor(CheckingExecutor):
    """The device of a small model: it draws what the large one draws, except after every third prefix or so. Its
    sequences have a new number for each round of drafts, and begin with the tokens known then."""

    def submit(self, batch: ScheduledBatch) -> _Handle:
        for row in batch.rows:
            if row.seq_id not in self.truths:
                self.begun.setdefault(row.seq_id, tuple(row.output_token_ids))
        return super().submit(batch)

    def masks(self, batch: ScheduledBatch) -> dict[int, frozenset[int]]:
        """As for any batch; of a grammar that cannot go on nothing is drafted, and a draw under way is thrown away."""
        draws = {draw.seq_id: draw.constraint for row in batch.rows for draw in row.draws}
        self.ended = lambda seq_id: (
            isinstance(found := draws[seq_id], Steps) and (found.terminated or len(found.accepted) == found.fails_at)
        )
        return super().masks(batch)

    def _token(self, draw: Draw, truth: _Truth, position: int, first: bool) -> int:
        token = super()._token(draw, truth, position, first)
        if truth.chains[position - 1] % 3 or draw.constraint is not None:
            return token
        return (token + 1) % VOCAB


class HeadDevice:
    """The device of a head: it draws anything that is allowed, and checks that rows follow from what it has computed.
    Blocks that sequences share may hold entries of either, so their contents are not checked."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._computed: dict[int, tuple[list[int], list[int]]] = {}
        """By the identity of a list of blocks: that list, and the tokens of its entries."""

    def submit(self, batch: ScheduledBatch) -> _HeadHandle:
        for row in batch.rows:
            check(row.end // self._size < len(row.block_ids), "there is no block for the next entry's feature")
            tokens = row.token_ids
            check(len(tokens) == row.num_tokens and row.num_tokens > 0, "a row without tokens")
            _, known = self._computed.get(id(row.block_ids), (row.block_ids, []))
            check(row.start <= len(known), "entries were left out")
            before = [*row.prompt_token_ids, *row.output_token_ids][: row.start]
            check(all(a in (PLACEHOLDER, b) for a, b in zip(known, before, strict=False)), "entries of wrong tokens")
            self._computed[id(row.block_ids)] = row.block_ids, [*before, *tokens]  # a list that is held keeps its id
        return _HeadHandle(batch)


class _HeadHandle:
    def __init__(self, batch: ScheduledBatch) -> None:
        self._batch = batch
        self._tokens: dict[int, int] = {}

    def draw(self) -> None:
        for row in self._batch.rows:
            for draw in row.draws:
                constraint = draw.constraint
                allowed = range(VOCAB) if constraint is None else sorted(constraint.allowed())
                self._tokens[draw.seq_id] = allowed[hash((draw.seed, draw.choice, row.end)) % len(allowed)]

    def result(self) -> StepResult:
        return StepResult(dict(self._tokens))


class _Handle:
    def __init__(self, executor: CheckingExecutor, batch: ScheduledBatch) -> None:
        self._executor = executor
        self._batch = batch
        self._result: StepResult | None = None
        self._masks: dict[int, frozenset[int]] | None = None
        self.constrained = any(draw.constraint is not None for row in batch.rows for draw in row.draws)

    def draw(self) -> None:
        check(self._masks is None, "draws are asked for twice")
        self._executor._break(self._batch.step, "draw")
        self._masks = self._executor.masks(self._batch)
        if not self._executor.late:
            self.run()

    def run(self) -> StepResult:
        """Let the device compute the step."""
        check(self._masks is not None or not self.constrained, "a result before its draws were asked for")
        if self._result is None:
            self._result = self._executor.execute(self._batch, self._masks or {})
        return self._result

    def result(self) -> StepResult:
        self._executor._break(self._batch.step, "result")
        result = self.run()
        self._executor.told(self._batch, result)
        return result
