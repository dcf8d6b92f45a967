"""Order of requests: the smallest key gets the next turn, and is preempted last.

Between clients this is start-time fair queueing (Goyal, Vin and Cheng 1996). The virtual time of the engine is the
start tag of the newest request that has got its turn. A request that arrives gets a start tag: the virtual time, or the
end of what its client has been given before, if that is later. That end moves on by the tokens of the request over the
weight of its client. So clients that want more than there is get tokens in proportion to their weights, a client that
is new goes before the backlog of others, and a lone client's requests are served in the order of arrival. The
tokens of an answer are not known when it begins: they are estimated, and what was estimated too much is given back when
it ends.

Keys do not change while a request waits, and the virtual time grows: whatever waits is overtaken by a bounded number
of tokens. A policy's level (``orders/``) moves a start tag by less than ``patience`` tokens to either side, so this
bound holds for the least urgent request too: 2 * ``patience`` tokens more.

Plain arithmetic on what was added, admitted and ended. No clock is read: all ranks of an engine, and a replay, agree.
"""

from __future__ import annotations

from dataclasses import dataclass

from .orders.registry import order_policy
from .routing import TYPICAL_OUTPUT

PATIENCE_STEPS = 64
"""Full steps whose tokens bound the effect of a priority."""
MOST_CLIENTS = 256
"""Number of remembered clients above which those without a claim are forgotten; at most twice as many are kept."""

Key = tuple[float, float, int]
"""(start tag adjusted by level, level, minus the tokens that may be drawn if ``longest_first``)."""

RULES = {
    "order": {
        "by": ("Order.enter", "Order.key", "Order._start", "Order.admitted", "Order.ended"),
        "settings": {"scheduling_policy": "priority"},
    }
}


@dataclass(slots=True)
class Turn:
    """The claim of a request.

    Attributes:
        key: its place in the order.
        start: its start tag, in tokens of virtual time.
        tokens: estimate of the tokens that it will compute.
    """

    key: Key
    start: float
    tokens: int
    client: str
    weight: float


def check_priority(priority: int, policy: str) -> None:
    """Refuse a priority that the policy ignores.

    Raises:
        ValueError: says what to change.
    """
    if priority and not order_policy(policy).priorities:
        order = "in the order of arrival" if policy == "fcfs" else "in another order"
        raise ValueError(
            f"priority is {priority}, but requests are served {order} here (scheduling policy {policy}): "
            "leave it out, or have the engine started with --scheduling-policy priority"
        )


class Order:
    """Assigns keys to requests, in the order of their arrival.

    Args:
        policy: gives requests levels (``orders/``).
        patience: tokens; see above.
        longest_first: by level, then by the tokens that may be drawn: an order for work that is all there at the
            start. Clients are not told apart, and nothing is bounded.
        arrival: in the order of arrival alone (static batches).
    """

    def __init__(
        self, policy: str = "fcfs", *, patience: float = 0.0, longest_first: bool = False, arrival: bool = False
    ) -> None:
        self._level = order_policy("fcfs" if arrival else policy).level
        self._patience = patience
        self._longest_first = longest_first and not arrival
        self.shared = not (longest_first or arrival)
        """True if clients share the engine by weight."""
        self.reset()

    def reset(self) -> None:
        """Forget all claims."""
        self.now = 0.0
        """Virtual time, in tokens of a client of weight 1."""
        self._ends: dict[str, float] = {}
        """End tag of each client: the end of the work that it has been given."""
        self._starts: dict[str, float] = {}
        """Start tag of each client's newest request."""

    def enter(self, client: str, weight: float, priority: int, prompt: int, outputs: int, n: int) -> Turn:
        """Build the claim of a request that arrives.

        Args:
            prompt: tokens.
            outputs: most tokens that each of its ``n`` choices may draw.
        """
        tokens = self.tokens(prompt, outputs, n)
        key, start = self.key(client, priority, outputs), self._start(client)
        if self.shared:
            self._ends[client], self._starts[client] = start + tokens / weight, start
            if len(self._ends) > MOST_CLIENTS:
                self._forget_served()
        return Turn(key, start, tokens, client, weight)

    @staticmethod
    def tokens(prompt: int, outputs: int, n: int) -> int:
        """Estimate the tokens that a request will compute; arguments as of ``enter``."""
        return prompt + n * min(outputs, TYPICAL_OUTPUT)

    def key(self, client: str, priority: int, outputs: int) -> Key:
        """Return the key of a request if it arrived now; arguments as of ``enter``."""
        level = self._level(priority, outputs)
        if not self.shared:
            return 0.0, level, -outputs if self._longest_first else 0
        return self._start(client) + self._patience * level / (1 + abs(level)), level, 0

    def _start(self, client: str) -> float:
        return max(self.now, self._ends.get(client, 0.0), self._starts.get(client, 0.0)) if self.shared else 0.0

    def admitted(self, turn: Turn) -> None:
        """Advance the virtual time: a request has got its turn."""
        self.now = max(self.now, turn.start)

    def ended(self, turn: Turn, computed: int) -> None:
        """Settle the account of a request that ended after ``computed`` tokens: refund the rest of the estimate to its
        client, or charge the excess."""
        if turn.client in self._ends:
            self._ends[turn.client] += (computed - turn.tokens) / turn.weight

    def _forget_served(self) -> None:
        """Forget clients whose claims lie in the past: they are treated like new ones."""
        for client in [name for name, end in self._ends.items() if max(end, self._starts[name]) <= self.now]:
            del self._ends[client], self._starts[client]
        if len(self._ends) > 2 * MOST_CLIENTS:  # of many with a small claim, the smallest are forgotten
            for client in sorted(self._ends, key=self._ends.__getitem__)[:MOST_CLIENTS]:
                del self._ends[client], self._starts[client]
