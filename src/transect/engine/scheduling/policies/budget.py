"""Bound the tokens of a step while sequences decode, because their next tokens wait for the whole step.

The first rule that applies is used:

* ``itl_target``: as many tokens as take no longer than a target, by the learned step times of this device
  (``step_time``). If many steps have prompts, fewer, if each token then costs much less. The target grows with the
  queue, if prompts would wait for more than ``PATIENCE`` such steps. (Sarathi-Serve, Agrawal et al. 2024, bounds tokens
  instead of time.) Deep in a long prompt each chunk reads much context, however few tokens it has. Where that takes
  most of the room for prompts, chunks have as many tokens as take as long as their context (a third of that beside
  streams of other clients), and steps without prompts lie between them, so that steps take no longer than the target
  in the mean. Few of these chunks have two tokens, whose time bounds that of the read.
* ``fill_tokens``: as many tokens as cost little more than the decodes alone, as long as nothing ends later for that
  (``filling``).
* ``max_mixed_tokens``: that number.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Listed
from itertools import islice
from typing import NamedTuple

from ....costs.learning import KNOTS, StepTimes
from ....costs.steps import StepLoad, joined
from ..request import Sequence
from ..scheduler_config import SchedulerConfig
from ..waiting_queue import WaitingQueue
from .filling import nothing_ends_later
from .turns import LOOKED_AT, NO_PAUSES, Recent, Rooms, Turns, take_turns

AUTO_RATIO = 2.5
"""Time of a step with prompts over the time of its decodes alone, if no target in milliseconds is set."""
PATIENCE = 8
"""Number of steps that prompts may wait before steps become longer than the target."""
LONG = 4
"""Steps of a prompt above which it leaves room for shorter prompts (``_shares``). If no sequence decodes, steps have
full size, and a prompt that needs more than one step leaves room."""
SHORTEST = 2
"""Shares of a step for the shortest prompts, if there are two or more; all other prompts get one share."""
FELT = 2048
"""Most tokens of a prompt that count as waiting. A longer one is no longer queue, and the longest prompt is none: one
user waits for it, and the streams of all others would feel longer steps. Embeddings, scores and log-probabilities of
prompts do not count: their results come in one piece, and the sum of their times is the same."""
FEW = 8
"""Number of waiting prompts above which all their tokens count."""
LARGE = 4
"""Queue length that justifies steps launched kernel by kernel, in units of the largest step launched as a graph: the
device waits while the first of these steps is launched."""
CHEAP = 0.85
"""Largest relative cost of a prompt token in a smaller step for which the step is made smaller than the target allows,
if many steps have prompts (their costs add up for all streams). With an 8B model on an H200 a prompt token costs 11 us
in steps of 256 tokens and 15 in those of 384."""
MANY = 0.12
"""Share of steps with prompts from which ``CHEAP`` applies."""
SHORT = 4
"""Number of such steps that the waiting prompts may need for ``CHEAP`` to apply."""
SMOOTHING = 1 / 128
"""Weight of the newest step in the share of steps with prompts."""
KEPT = 0.75
"""Share of a step's room for prompts that must remain when its tokens are rounded down (``even``)."""
READS, READS_BESIDE = 2.0, 4 / 3
"""Least time of a chunk in units of the read of its context; the second if others than its client feel the step."""
PROBE = 8
"""One of this many steps that a read makes longer has a chunk of two tokens. Chunks of about as many tokens as each
other do not tell the time of a read from that of the tokens that attend to it, and a read that looks slow makes chunks
grow, and steps with them."""
PAUSES = 32
"""Most steps without prompts for each step with prompts that is longer than the target: where the decodes alone take
almost as long as the target, prompts would wait until they end."""
LEARN_STEPS = 8
"""Steps to measure before steps are sized by time."""

TIMED = {"itl_target": 0.0, "max_num_seqs": 4, "max_num_batched_tokens": 48}
"""Settings with which a small engine sizes many steps by time."""
RULES = {
    "budget": {"by": ("StepBudget._by_time",), "settings": TIMED, "bounds": {"gap": 1.2, "first_token": 1.2}},
    "shares": {"by": ("StepBudget._shares",), "settings": TIMED},
    "step_size": {"by": ("even",), "settings": TIMED},
}


class Share(NamedTuple):
    """Share of a step for prompts of similar lengths together."""

    over: int
    """Lower bound (exclusive) of the tokens that each of these prompts has left; the share before gives the upper
    one."""
    tokens: int


class Budget(NamedTuple):
    """Bounds on the tokens of a step."""

    tokens: int
    chunk: int
    """Most tokens of one prompt in the step."""
    shares: tuple[Share, ...] = ()
    """Shares of prompts, longest prompts first; empty if prompts take tokens in order of rank."""
    pause: bool = False
    """Prompts take no part in the step."""
    rooms: Mapping[str, int] = {}
    """Most prompt tokens of each client that is limited (``turns``)."""
    held: int = 0
    """Prompts that have begun and have no token of their own in the step, because their clients are limited."""


class Coming(NamedTuple):
    """Facts of the next step that are known before it is planned."""

    tokens: int
    full: bool
    """True if a prompt that arrives now would not be part of the step."""


class StepBudget:
    """Sizes the steps in which sequences decode.

    Args:
        config: the limits and rules.
        times: learned step times; used with ``config.itl_target``.
    """

    def __init__(self, config: SchedulerConfig, times: StepTimes) -> None:
        self.fill_tokens = config.fill_tokens
        """Most tokens of steps that are filled up with prompts; may be changed between steps."""
        self.times = times
        self._share = 0.0
        """Smoothed share of steps with prompts."""
        self._lengthened = 0
        """Steps that a read of context made longer."""
        self._debt = 0.0
        """Seconds by which steps with prompts were longer than the target, less those by which pauses were shorter."""
        self._turns = NO_PAUSES
        self.rooms = Rooms()
        self.recent = Recent()
        self._next = (0.0, math.inf)
        """Seconds that the next step adds to ``_debt`` if it has prompts, and takes from it if it has none."""
        self._room = StepLoad(0), 0.0
        """Decodes of the next step, and the seconds beyond these that prompts may take."""
        self._kept: tuple[object, Budget, tuple[float, float]] | None = None
        """State that the newest bounds were computed in, these bounds, and ``_next`` with them."""
        self._config = config
        self._mixed = min(config.max_mixed_tokens or config.max_num_batched_tokens, config.max_num_batched_tokens)
        self._chunk = config.max_prefill_chunk or config.max_num_batched_tokens
        graph = config.graph_tokens or 0
        self._graph = min(graph, self._mixed) if graph >= 2 * config.max_num_seqs else self._mixed

    def rows(self, running: Listed[Sequence], waiting: WaitingQueue) -> Turns:
        """Choose the decoding sequences of the next step; to be called before ``of_next``."""
        config, self._turns = self._config, NO_PAUSES
        if config.itl_target is not None and config.pipeline_depth == 1 and self.times.steps >= LEARN_STEPS:
            clients, ratio, target = waiting.new.by_client, AUTO_RATIO, config.itl_target
            self._turns = take_turns(running, clients, self.times, ratio, target, self.recent)
        return self._turns

    def of_next(
        self,
        running: Listed[Sequence],
        waiting: WaitingQueue,
        cut: bool,
        barred: bool = False,
        state: tuple[int, ...] | None = None,
    ) -> Budget:
        """Return the bounds of the next step.

        Args:
            cut: the step before left a prompt unfinished.
            barred: the step before had no place or no KV blocks for the head of the queue. Then long prompts leave no
                room for waiting ones, which could not use it.
            state: numbers of which one changes whenever the sequences do; bounds for an equal state are not computed
                again. None if they are not known.
        """
        if state is None:
            self._kept = None
            return self._bounds(running, waiting, cut, barred)
        key = state, self.times.steps, self.fill_tokens, self._turns, self._lengthened
        if self._kept is None or self._kept[0] != key:
            found = self._bounds(running, waiting, cut, barred)
            self._kept = key, found, self._next
        _, found, self._next = self._kept
        return found

    def _bounds(self, running: Listed[Sequence], waiting: WaitingQueue, cut: bool, barred: bool) -> Budget:
        self._next = (0.0, math.inf)
        self._room = StepLoad(0), 0.0
        self.rooms.discard()
        decodes = any(map(_decodes, running))
        if decodes and not (len(waiting) or cut):
            return Budget(self._mixed, self._chunk)
        timed = self._config.itl_target is not None
        expected = self._expected(running, waiting) if timed and self.times.steps >= LEARN_STEPS else 0
        if not (decodes or expected):
            most = self._config.max_num_batched_tokens
            prompts = [seq.length - seq.scheduled for seq in running if seq.length - seq.scheduled > 1]
            return Budget(most, self._chunk, self._shares(most, most, prompts, waiting, barred) if timed else ())
        if self._config.itl_target is not None:
            if self.times.steps >= LEARN_STEPS:
                return self._by_time(self._config.itl_target, running, waiting, barred, expected)
        elif self._fills(running, waiting):
            assert self.fill_tokens is not None
            return Budget(self.fill_tokens, self._chunk)
        return Budget(self._mixed, self._chunk)

    def planned(self, prompts: bool, taken: Mapping[str, StepLoad] = {}) -> None:
        """Record a planned step, with prompts or without; ``taken``: work of the prompts of each client."""
        decodes, room = self._room
        alone = self.times.predict(decodes)
        seconds = {client: self.times.predict(joined(decodes, load)) - alone for client, load in taken.items()}
        self.rooms.planned({client: each / room for client, each in seconds.items()} if room > 0 else {})
        self.recent.planned()
        self._share += SMOOTHING * (prompts - self._share)
        more, less = self._next
        if prompts:
            self._debt += more
            self._lengthened += more > 0.0
        else:
            self._debt = max(self._debt - less, -less) if less < math.inf else 0.0

    def decoded(self, steps: int) -> None:
        """Record ``steps`` planned steps without prompts, none of which waits."""
        share = self._share
        for _ in range(steps):
            share += SMOOTHING * (0.0 - share)
        self.rooms.discard()
        self.rooms.decoded(steps)
        self.recent.planned(steps)
        self._share, self._debt, self._next = share, 0.0, (0.0, math.inf)

    def coming(
        self,
        running: Listed[Sequence],
        waiting: WaitingQueue,
        cut: bool,
        barred: bool = False,
        state: tuple[int, ...] | None = None,
    ) -> Coming:
        """Return the facts of the next step if it were planned now; arguments as of ``of_next``."""
        if not (len(waiting) or cut):
            return Coming(len(running), False)
        tokens, chunk, _, pause, rooms, _ = self.of_next(running, waiting, cut, barred, state)
        if pause:
            return Coming(tokens, True)
        if rooms or self.rooms.charged:  # prompts of limited clients fill less of the step, and yield to a newcomer's
            return Coming(tokens, False)
        here = sum(min(seq.length - seq.scheduled, chunk) for seq in running)
        here += waiting.num_tokens if chunk >= tokens else sum(min(seq.to_compute, chunk) for seq in waiting.in_order())
        return Coming(min(here, tokens), here >= tokens)

    def _expected(self, running: Listed[Sequence], waiting: WaitingQueue) -> int:
        """Count the clients without a stream whose answers have just ended; 0 if there is one client alone."""
        recent = set(self.recent)
        clients = recent.union(waiting.new.by_client, (seq.request.spec.client for seq in running))
        streams = (seq.request.spec.client for seq in running if _decodes(seq))
        return len(recent.difference(streams)) if recent and len(clients) > 1 else 0

    def _by_time(
        self, target: float, running: Listed[Sequence], waiting: WaitingQueue, barred: bool, expected: int
    ) -> Budget:
        prompts: list[tuple[str, int, int]] = []
        felt: list[int] = []
        rows, keys = 0, 0
        for seq in running:
            done = seq.scheduled
            count = seq.length - done
            if count <= 1:
                rows += 1
                keys += done + 1
                continue
            prompts.append((seq.request.spec.client, count, done))
            if not seq.request.spec.in_one_piece:
                felt.append(count)
        decodes = StepLoad(rows, keys)
        alone = self.times.predict(decodes._replace(tokens=rows + expected))
        seconds = target or min(AUTO_RATIO * alone, self._turns.seconds)
        parts: Mapping[str, float] = {}
        if not target and self._config.pipeline_depth == 1:
            clients = {client for client, _, _ in prompts}.union(waiting.new.by_client)
            parts = self.rooms.of_step(_weights(running, waiting), clients, AUTO_RATIO, expected > 0)
            self._room = decodes, seconds - alone
        here = [(count, done) for client, count, done in prompts if parts.get(client, 1.0) > 0.0]
        rows += sum(client not in parts for client, _, _ in prompts)
        rows += len({client for client, _, _ in prompts if parts.get(client, 0.0) > 0.0})
        beside = decodes._replace(tokens=rows)
        context = max((done for _, done in here), default=0)
        unscored = _unscored(running, waiting)
        waits, longest = _felt(felt, waiting)
        most = self._graph if waits < LARGE * self._graph else self._mixed
        if here and alone < seconds:
            least = self.times.with_chunk(beside, rows + 1, context, unscored=unscored)
            read = (READS_BESIDE if self.rooms.charged else READS) * self.times.read(context)
            usual, seconds = seconds, max(seconds, least, alone + read)
            self._next = seconds - usual, max(usual - alone, (seconds - usual) / PAUSES)
            if self._debt > 0.0 and seconds > usual and decodes.tokens and self._config.pipeline_depth == 1:
                return Budget(decodes.tokens, self._chunk, pause=True)
            if seconds > usual and self._lengthened % PROBE == 0:
                most = min(most, rows + 1)
        tokens = even(self.times.most_tokens(seconds, beside, context, most, unscored=unscored), rows)
        if self._share > MANY:
            cheap = self._cheap(tokens, beside, context, unscored)
            tokens = cheap if waits <= SHORT * (cheap - rows) else tokens  # more that waits would wait too long
        usual = tokens - rows
        steps = (waits - longest) / max(usual, 1) * (1 - _share_of_one(running, waiting, self.recent))
        if steps > PATIENCE:
            longer = seconds * steps / PATIENCE
            tokens = even(self.times.most_tokens(longer, beside, context, most, unscored=unscored), rows)
        if tokens <= rows:  # the decodes alone take longer than the target: prompts must not wait until they end
            tokens = max(rows, min(rows + max(-(-waits // PATIENCE), 1), most))
        room = tokens - rows
        long = LONG * (usual if usual > 0 else room)
        shares = self._shares(room, long, [count for count, _ in here], waiting, barred)
        contexts = {client: done for client, _, done in prompts}
        rooms = {
            client: self._tokens_of(part, room, contexts.get(client, 0), unscored) for client, part in parts.items()
        }
        return Budget(tokens, self._chunk, shares, rooms=rooms, held=len(running) - rows)

    def _tokens_of(self, part: float, room: int, done: int, unscored: float) -> int:
        """Return the prompt tokens for ``part`` of a step's ``room``, in time. A chunk also reads its context of
        ``done`` tokens, and weights: it has at least as many tokens as take the time of that, and its client then
        waits."""
        if part <= 0.0:
            return 0
        decodes, seconds = self._room
        alone = self.times.predict(decodes)
        read = self.times.with_chunk(decodes, decodes.tokens + 2, done, unscored=unscored) - alone
        wanted = max(part * seconds, READS * read)
        if wanted >= seconds:
            return room
        most = decodes.tokens + room
        return max(1, self.times.most_tokens(alone + wanted, decodes, done, most, unscored=unscored) - decodes.tokens)

    def _shares(
        self, room: int, long: int, prompts: Listed[int], waiting: WaitingQueue, barred: bool
    ) -> tuple[Share, ...]:
        """Divide a step's ``room`` into shares, if a prompt has more than ``long`` tokens to compute.

        Prompts of similar lengths, up to a factor of two, have one share together, used by rank. So several long
        prompts delay shorter ones no more than one does, and long prompts end one after the other. Unused parts of a
        share go to longer prompts (max-min fairness between lengths).

        Args:
            prompts: remaining tokens of each prompt that has begun.
        """
        longest = max(prompts, default=0)
        if longest <= long:
            return ()
        counts = list(prompts) if barred else [*prompts, *(seq.to_compute for seq in waiting.in_order())]
        overs = [longest // 2]
        while overs[-1] > long:
            overs.append(overs[-1] // 2)
        overs = [0, *reversed(overs)]
        totals, numbers = [0] * len(overs), [0] * len(overs)
        for count in counts:
            group = bisect_left(overs, count) - 1
            totals[group] += count
            numbers[group] += 1
        shares: list[Share] = []
        parts = sum(number > 0 for number in numbers)
        for over, total, number in zip(overs, totals, numbers, strict=True):
            if not number:
                continue
            mine = 1 if shares else min(number, SHORTEST)
            parts += mine - 1
            tokens = min(total, room, max(1, room * mine // parts)) if parts > mine else room
            shares.insert(0, Share(over, tokens))
            room, parts = room - tokens, parts - mine
        return tuple(shares) if len(shares) > 1 else ()

    def _cheap(self, most: int, beside: StepLoad, context: int, unscored: float) -> int:
        """Return ``most``, or the largest smaller number of tokens at which each prompt token costs much less, its part
        of the read of the ``context`` included."""
        alone = self.times.predict(beside)

        def each(tokens: int) -> float:
            whole = self.times.with_chunk(beside, tokens, context, unscored=unscored)
            return (whole - alone) / (tokens - beside.tokens)

        sizes = [knot for knot in KNOTS if beside.tokens < knot < most]
        limit = CHEAP * each(most) if sizes else 0.0
        return max((tokens for tokens in sizes if each(tokens) <= limit), default=most)

    def _fills(self, running: Listed[Sequence], waiting: WaitingQueue) -> bool:
        return (
            self.fill_tokens is not None
            and self.fill_tokens < self._mixed
            and len(waiting) + len(running) <= self._config.max_num_seqs
            and nothing_ends_later(self.fill_tokens, running, waiting.in_order())
        )


def _decodes(seq: Sequence) -> bool:
    return seq.scheduled + 1 == seq.length < seq.max_length


def _felt(prompts: Listed[int], waiting: WaitingQueue) -> tuple[int, int]:
    """Count prompt tokens that make steps longer, without requests that are answered in one piece; and those of the
    longest prompt, if there are few.

    Args:
        prompts: tokens left of those that have begun.
    """
    counts = [min(count, FELT) for count in prompts]
    if len(waiting) > FEW:
        return sum(counts) + waiting.num_felt, max(counts, default=0)
    counts += [min(seq.to_compute, FELT) for seq in waiting.in_order() if not seq.request.spec.in_one_piece]
    return sum(counts), max(counts, default=0)


def _share_of_one(running: Listed[Sequence], waiting: WaitingQueue, recent: Iterable[str]) -> float:
    """Return the share of the queue that one client has, whose queue lengthens no steps of others; 0 if no others
    decode or have just done so."""
    counts = waiting.new.by_client
    if not counts:
        return 0.0
    largest = max(counts, key=lambda client: counts[client][2])
    others = {seq.request.spec.client for seq in running if seq.request.prompt_done}.union(recent)
    return counts[largest][2] / max(waiting.new.work, 1) if others - {largest} else 0.0


def _weights(running: Listed[Sequence], waiting: WaitingQueue) -> dict[str, float]:
    """Return the weights of the clients with work; of those that are far back in the queue, 1."""
    weights = dict.fromkeys(waiting.new.by_client, 1.0)
    for seq in (*islice(waiting, LOOKED_AT), *running):
        weights[seq.request.spec.client] = seq.request.spec.weight
    return weights


def _unscored(running: Listed[Sequence], waiting: WaitingQueue) -> float:
    """Return the fewest tokens that any prompt of the next step has before one whose log-probabilities are requested;
    infinity if none has any."""
    head = waiting.head()
    first = math.inf if head is None else head.request.unscored(head.cached)
    return min([first, *(seq.request.unscored(seq.scheduled) for seq in running)])


def even(tokens: int, rows: int) -> int:
    """Round ``tokens`` down to a size that products cut into whole tiles and that has a graph, if that leaves nearly as
    many for prompts beside ``rows`` decoding rows. There is no graph for 192 or 1,152 tokens: such steps are padded to
    256 and 1,280."""
    unit = 64 if tokens < 192 or 256 <= tokens < 384 else 128 if tokens < 1024 else 256
    rounded = tokens // unit * unit
    return rounded if rounded - rows >= KEPT * (tokens - rows) else tokens
