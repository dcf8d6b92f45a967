"""Drafts for simulations: right at a given share of positions, where the tokens to come are given."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Listed

from ....costs.steps import StepLoad
from ..clock import VirtualClock
from ..request import Sequence
from ..virtual_device import VirtualDevice
from .drafter import Guess
from .drawn import Drafts, DrawnDrafts


class Ahead:
    """An iterator of tokens that can be looked ahead of.

    Args:
        tokens: iterator of the tokens.
    """

    def __init__(self, tokens: Iterator[int]) -> None:
        self._tokens = tokens
        self._seen: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return self._seen.pop(0) if self._seen else next(self._tokens)

    def peek(self, count: int) -> list[int]:
        """Return the next ``count`` tokens, fewer at the end, and leave them there."""
        while len(self._seen) < count:
            token = next(self._tokens, None)
            if token is None:
                break
            self._seen.append(token)
        return self._seen[:count]


class PlannedDrafter:
    """Guesses that are right with a given chance at each position.

    Args:
        acceptance: the chance that a draft is right if those before it are, from 0 to 1.
        outputs: the tokens to come, by seq_id.
    """

    def __init__(self, acceptance: float, outputs: Mapping[int, Iterator[int]]) -> None:
        self.acceptance, self._outputs = acceptance, outputs
        self._right: dict[int, list[bool]] = {}
        """Draws by seq_id and position: a position is guessed several times."""

    def guess(self, seq_id: int, prompt: tuple[int, ...], output: list[int], most: int) -> Guess:
        """Guess tokens, see ``Drafter``. A position is right or wrong whenever it is guessed."""
        coming = self._outputs[seq_id]
        assert isinstance(coming, Ahead)
        ahead, first = coming.peek(most), len(output)
        right = self._right.setdefault(seq_id, [])
        while len(right) < first + len(ahead):
            right.append(random.Random(seq_id << 32 | len(right)).random() < self.acceptance)
        tokens = [token if right[at] else token ^ 1 for at, token in enumerate(ahead, first)]
        return Guess(tuple(tokens), (1.0,) * len(tokens), 4)

    def ended(self, seq_id: int, output: list[int]) -> None:
        """Forget the draws of a sequence; see ``Drafter``."""
        self._right.pop(seq_id, None)


class PlannedModel(DrawnDrafts):
    """Drafts of a model whose step times are given; its work moves the clock.

    Args:
        device: has the tokens to come.
        acceptance: see ``PlannedDrafter``.
        step: seconds of a step of the model that drafts.
        max_model_len: most positions of a sequence.
    """

    def __init__(
        self, device: VirtualDevice, acceptance: float, step: Callable[[StepLoad], float], max_model_len: int
    ) -> None:
        super().__init__(device, max_tokens=0, max_rows=0, max_model_len=max_model_len, clock=device.clock)
        self._time: VirtualClock = device.clock
        self._step_seconds = step
        self._guesses = PlannedDrafter(acceptance, device.outputs)
        self._computed_to: dict[int, int] = {}
        """Tokens of each sequence that the model has computed."""

    def behind(self, seq: Sequence) -> int:
        """Return the known tokens that are not computed, see ``DrawnDrafts``; after drafts, one at least."""
        return max(1, seq.length - self._computed_to.get(seq.seq_id, 0))

    def ended(self, seq_id: int, output: list[int]) -> None:
        """Forget a sequence."""
        self._computed_to.pop(seq_id, None)
        self._guesses.ended(seq_id, output)

    def _forget_all(self) -> None:
        self._computed_to.clear()

    def seconds(self, rows: Listed[int], behind: int, length: int) -> float:
        """Return the seconds of drafting; see ``DrawnDrafts``."""
        if not rows:
            return 0.0
        more = max(behind - rows[0], 0)
        first = StepLoad(rows[0] + more, rows[0] * length, more * length, rows[0])
        later = (StepLoad(count, count * length, 0, count) for count in rows[1:])
        return self._step_seconds(first) + sum(map(self._step_seconds, later))

    def draft(self, wanted: Iterable[tuple[Sequence, int]]) -> Drafts:
        """Draft tokens, and let their time pass; see ``DrawnDrafts``."""
        chosen = [(seq, min(count, self.max_model_len - seq.length)) for seq, count in wanted]
        chosen = [(seq, count) for seq, count in chosen if count > 0]
        if not chosen:
            return {}
        depths = [sum(count > depth for _, count in chosen) for depth in range(max(count for _, count in chosen))]
        length = sum(seq.length for seq, _ in chosen) // len(chosen)
        self.seconds_spent = self.seconds(depths, sum(self.behind(seq) for seq, _ in chosen), length)
        self._time.advance(self.seconds_spent)
        found: Drafts = {}
        for seq, count in chosen:
            self._computed_to[seq.seq_id] = seq.length
            guess = self._guesses.guess(seq.seq_id, seq.prompt_token_ids, seq.output_token_ids, count)
            if guess.tokens:
                found[seq.seq_id] = guess.tokens
        return found
