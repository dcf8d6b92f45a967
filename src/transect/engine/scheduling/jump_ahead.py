"""Jump-ahead: tokens that a grammar forces are not drawn one by one, but computed together in one step.

Where only one token may come, its mask has one bit, and whatever is drawn is that token. So once a step's token is
known, those that must follow are, too. They join the output at once, and the next step computes them as a chunk and
draws what comes after them. The tokens are the same as without.

Where steps are planned ahead, a draw of the sequence is in flight at that moment, for the first of the forced tokens:
it is *void*, and its token is dropped when it comes. One forced token alone is then left to that draw.

Requests with logprobs do not jump: each of their tokens has a draw to report. Nor do those with ``allowed_token_ids``,
which a forced token need not be among.
"""

from __future__ import annotations

from collections import deque

from .request import Sequence

MOST_KEPT = 4096


class JumpAhead:
    """Finds forced tokens, and records which draws are void.

    Args:
        enabled: False finds none.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._void: dict[int, int] = {}
        """Step whose draw is void, by seq_id."""
        self.taken = 0
        """Number of tokens that were not drawn."""
        self.last: deque[tuple[int, int]] = deque(maxlen=MOST_KEPT)
        """(seq_id, number of tokens) of the jumps since the decision log last emptied this list."""

    def reset(self) -> None:
        """Forget the void draws, when no step is in flight."""
        self._void.clear()

    def is_void(self, seq_id: int, step: int) -> bool:
        """Return True if the token that this step draws for a sequence is known already."""
        return self._void.get(seq_id) == step

    def drop(self, seq_id: int) -> None:
        """Record that the void draw has arrived."""
        self._void.pop(seq_id, None)

    def forced(self, seq: Sequence, token: int, least: int, most: int) -> list[int]:
        """Return the tokens that must follow ``token``, the last one known; the constraint accepts them.

        Args:
            least: fewer are not worth it, and none are taken.
            most: largest number of tokens to take.
        """
        constraint, params = seq.constraint, seq.request.spec.params
        if constraint is None or params.logprobs is not None or params.allowed_token_ids is not None:
            return []
        if token in seq.stop_ids or constraint.terminated:
            return []
        found = constraint.forced()[: max(most, 0)]
        end = next((at for at, each in enumerate(found) if each in seq.stop_ids), len(found))
        if end < least:
            return []
        for at, each in enumerate(found[:end]):
            if constraint.accept(each) is not None:  # the next draw meets the same complaint
                return found[:at]
        return found[:end]

    def jump(self, seq: Sequence, token: int) -> list[int]:
        """Append the tokens that must follow ``token``, the last of the output, and continue planning after them."""
        if not self._enabled:
            return []
        known = seq.prompt_len + len(seq.output_token_ids)
        in_flight = seq.length > known
        tokens = self.forced(seq, token, 1 + in_flight, seq.max_length - 1 - known)
        if tokens:
            seq.output_token_ids.extend(tokens)
            seq.length = known + len(tokens)
            if in_flight:
                self._void[seq.seq_id] = seq.last_step
            self.taken += len(tokens)
            self.last.append((seq.seq_id, len(tokens)))
        return tokens
