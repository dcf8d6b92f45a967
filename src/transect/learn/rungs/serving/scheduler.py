r"""Users come when they like and write as long as they like. *Static* batching waits until a batch is full, and
until its longest answer is done: most places are empty most of the time. *Continuous* batching decides in every
step (a step is one forward pass, some tens of milliseconds). Who is done leaves at once, and the next in the queue
takes the place.

A step computes some tokens for each of some sequences, at most `max_tokens` together. A sequence that decodes needs
one. A prompt needs all of its tokens, and may be cut into *chunks*, so that a prompt of 10,000 tokens does not stop
everybody else for a second. So:

1. Every sequence that decodes gets its one token. It never waits behind a prompt.
2. What is left of the budget goes to prompts that have begun, then to new ones, first come first served. A new one
   is let in only if there is a place (`max_seqs`) and there are KV blocks for its whole length.
3. A decoding sequence crosses into a new block now and then. When none is free, somebody must give his back:
   *preemption*. Take the youngest that has nothing in this step yet. It loses its KV, goes back to the *front* of
   the queue, and computes its prompt and the tokens that it had already made once more (its tokens are known, only
   their KV is gone).

The oldest is never preempted while a younger one runs, so somebody always gets done: no deadlock. This is the whole
of the engine's `Scheduler`, without choices, grammars, priorities and time targets. `transect learn use scheduler`
puts yours into the live server.
"""

from ...record import Case, Live, Rung, Speed

SOLUTION = '''from collections import deque


class Sequence:
    """One request: how many tokens it has (prompt, and what was drawn), and how many of them are computed."""

    def __init__(self, name, length):
        self.name = name
        self.length = length
        self.done = 0
        self.blocks = []


class Scheduler:
    """Continuous batching over a pool of KV blocks 0 .. num_blocks - 1 of block_size tokens each.

    A step computes at most max_tokens tokens of at most max_seqs sequences; max_tokens is at least max_seqs, and any
    sequence alone fits into the pool.
    """

    def __init__(self, num_blocks, block_size, max_tokens, max_seqs):
        self.block_size, self.max_tokens, self.max_seqs = block_size, max_tokens, max_seqs
        self.free = list(range(num_blocks))
        self.waiting = deque()
        self.running = []

    def add(self, name, length):
        """A request with a prompt of ``length`` tokens arrives."""
        self.waiting.append(Sequence(name, length))

    def schedule(self):
        """The next step: a list of (name, start, count, blocks). It computes tokens start .. start + count - 1 "
        "of each,
        whose KV goes into ``blocks``: position p into block p // block_size of that list."""
        rows, planned, spare = [], set(), self.max_tokens
        for seq in sorted(self.running, key=lambda seq: seq.length - seq.done > 1):  # decodes first
            take = min(seq.length - seq.done, spare)
            if seq in self.running and take and self.make_room(seq, seq.done + take, planned):
                rows.append(self.row(seq, take, planned))
                spare -= take
        while self.waiting and spare and len(self.running) < self.max_seqs:
            seq = self.waiting[0]
            if -(-seq.length // self.block_size) > len(self.free):
                break
            self.running.append(self.waiting.popleft())
            self.make_room(seq, seq.length, planned)
            take = min(seq.length, spare)
            rows.append(self.row(seq, take, planned))
            spare -= take
        return rows

    def row(self, seq, take, planned):
        """Plan ``take`` tokens of a sequence."""
        planned.add(seq)
        start, seq.done = seq.done, seq.done + take
        return seq.name, start, take, list(seq.blocks)

    def make_room(self, seq, end, planned):
        """Give a sequence blocks for ``end`` tokens, by preemption if need be. False if it was preempted itself."""
        while len(seq.blocks) * self.block_size < end:
            if self.free:
                seq.blocks.append(self.free.pop())
                continue
            victim = next(each for each in reversed(self.running) if each not in planned)
            self.running.remove(victim)
            self.release(victim)
            self.waiting.appendleft(victim)
            if victim is seq:
                return False
        return True

    def release(self, seq):
        """Take the blocks of a sequence back."""
        self.free.extend(seq.blocks)
        seq.blocks, seq.done = [], 0

    def commit(self, name):
        """A step computed the last known token of this sequence and drew another one: it is one longer."""
        next(seq for seq in self.running if seq.name == name).length += 1

    def finish(self, name):
        """The request is done or was given up; it may be anywhere."""
        for seq in [seq for seq in (*self.running, *self.waiting) if seq.name == name]:
            self.release(seq)
            (self.running if seq in self.running else self.waiting).remove(seq)
'''


def _drive(module, num_blocks, block_size, max_tokens, max_seqs, requests):
    """Run all requests [arrival step, prompt, answer]; the rows of every step."""
    scheduler = module.Scheduler(num_blocks, block_size, max_tokens, max_seqs)
    lengths, left, trace, idle, step = {}, {}, [], 0, 0
    pending = list(enumerate(requests))
    while pending or left:
        while pending and pending[0][1][0] <= step:
            name, (_, prompt, answer) = pending.pop(0)
            lengths[name], left[name] = prompt, answer
            scheduler.add(name, prompt)
        rows = [[name, start, count, list(blocks)] for name, start, count, blocks in scheduler.schedule()]
        trace.append(rows)
        idle = 0 if rows else idle + 1
        if idle > 20 or step > 3000:
            break
        for name, start, count, _ in rows:
            if name in left and start + count == lengths[name]:
                left[name] -= 1
                if left[name]:
                    lengths[name] += 1
                    scheduler.commit(name)
                else:
                    del left[name]
                    scheduler.finish(name)
        step += 1
    return trace


def _judge(arguments, trace):
    """Walk through the trace with a pool that knows who wrote each slot last."""
    num_blocks, block_size, max_tokens, max_seqs, requests = arguments
    lengths = {name: prompt for name, (_, prompt, _) in enumerate(requests)}
    left = {name: answer for name, (_, _, answer) in enumerate(requests)}
    done, writer, last, order = {}, {}, {}, []
    try:
        for step, rows in enumerate(trace):
            if len(rows) > max_seqs:
                return f"step {step} has {len(rows)} sequences, and max_seqs is {max_seqs}"
            if (total := sum(count for _, _, count, _ in rows)) > max_tokens:
                return f"step {step} computes {total} tokens, and max_tokens is {max_tokens}"
            if len({name for name, *_ in rows}) < len(rows):
                return f"step {step} has a sequence twice"
            for name, start, count, blocks in rows:
                if left.get(name, 0) == 0 or requests[name][0] > step:
                    return f"step {step} runs request {name}, which is done or has not come yet"
                if start not in (0, done.get(name, 0)) or count < 1 or start + count > lengths[name]:
                    return (
                        f"step {step} computes tokens {start} to {start + count - 1} of request {name}, of which "
                        f"{done.get(name, 0)} are computed and {lengths[name]} known"
                    )
                if len(blocks) * block_size < start + count:
                    return f"step {step}: request {name} has {len(blocks)} blocks for {start + count} tokens"
                if len(set(blocks)) < len(blocks) or not all(0 <= block < num_blocks for block in blocks):
                    return f"step {step}: the blocks of request {name} are not different blocks of the pool"
                waited = done.get(name, 0) == lengths[name] - 1 and start and last[name] < step - 1
                if waited:
                    return f"request {name} decodes, and waited from step {last[name]} to step {step}"
                if name not in order:
                    order.append(name)
                    if any(
                        requests[other][0] <= requests[name][0] and other < name and other not in order
                        for other in lengths
                    ):
                        return f"request {name} was let in before an older one"
                for p in range(start):
                    if writer.get((blocks[p // block_size], p % block_size)) != (name, p):
                        return (
                            f"step {step}: the KV of token {p} of request {name} is not in its block any more: "
                            f"it was "
                            "given away, or written over"
                        )
            for name, start, count, blocks in rows:
                for p in range(start, start + count):
                    writer[blocks[p // block_size], p % block_size] = (name, p)
                done[name], last[name] = start + count, step
            for name, start, count, blocks in rows:
                places = [(p, (blocks[p // block_size], p % block_size)) for p in range(start, start + count)]
                if any(writer[place] != (name, p) for p, place in places):
                    return f"step {step}: two sequences write into one block"
                if start + count == lengths[name]:
                    left[name] -= 1
                    lengths[name] += 1 if left[name] else 0
        unfinished = [name for name, count in left.items() if count]
        if unfinished:
            return f"{len(unfinished)} requests are never done: nothing was planned any more, or only restarts"
    except (TypeError, ValueError, KeyError, IndexError) as error:
        return f"schedule() must return rows (name, start, count, blocks): {error}"
    return ""


def _live(mine, shipped):
    from ...live_scheduler import live_scheduler

    return live_scheduler(mine.Scheduler)


def _requests(rng, count, spread, prompt, answer):
    arrivals = sorted(int(each) for each in rng.integers(0, spread + 1, count))
    return [[a, int(rng.integers(1, prompt + 1)), int(rng.integers(1, answer + 1))] for a in arrivals]


_PREEMPT = (
    "When no block is free, the youngest sequence without tokens in this step gives its blocks back and waits in front."
)

RUNG = Rung(
    name="scheduler",
    title="Continuous batching: who runs in the next step",
    road="serving",
    place=5,
    kind="python",
    minutes=120,
    after=("paged_attention", "sampler"),
    solution=SOLUTION,
    holes=("Scheduler.__init__", "Scheduler.add", "Scheduler.schedule", "Scheduler.row", "Scheduler.make_room",
           "Scheduler.release", "Scheduler.commit", "Scheduler.finish"),
    answers={"run": lambda *arguments: None},
    drives={"run": _drive},
    judges={"run": _judge},
    cases=(
        Case("one request", lambda rng: [20, 4, 16, 4, [[0, 7, 5]]],
             "First all tokens of the prompt, then one token a step: start is what is computed, count what is left."),
        Case("three at once", lambda rng: [50, 4, 32, 4, [[0, 7, 5], [0, 3, 9], [0, 10, 2]]],
             "Everybody who has a place runs in every step, each with its own blocks."),
        Case("a long prompt", lambda rng: [60, 4, 16, 4, [[0, 3, 30], [2, 100, 3]]],
             "A prompt longer than the budget is computed in chunks, beside those that decode."),
        Case("more requests than places", lambda rng: [100, 4, 16, 3, [[0, 5, 4]] * 10],
             "Who is done leaves at once, and the next in the queue takes the place."),
        Case("a full pool", lambda rng: [12, 4, 16, 4, [[0, 8, 20], [0, 8, 20], [0, 8, 20]]], _PREEMPT),
        Case("a full pool, prompts on the way", lambda rng: [14, 4, 12, 6, _requests(rng, 12, 20, 14, 20)], _PREEMPT),
        Case("40 random requests", lambda rng: [40, 4, 24, 8, _requests(rng, 40, 60, 30, 30)],
             "Decodes first, then prompts that have begun, then the queue, in the order of arrival."),
        Case("blocks of one token", lambda rng: [60, 1, 8, 4, _requests(rng, 15, 10, 12, 12)],
             "Count blocks with the block size: round up."),
    ),
    speed=Speed(lambda rng: [60, 4, 32, 8,
                             [[0, int(rng.integers(3, 9)), 40 if i % 4 == 0 else 4] for i in range(32)]],
                "It takes many more steps: places stay empty while others run. Let the next request in as soon "
                "as there is a "
                "place, and do not wait for the whole batch.",
                measure=lambda arguments, trace: len(trace), unit="steps", ratio=1.25),
    hints=("Walk over the running ones, those with one token to go first; then admit from the queue.",
           "spare = max_tokens at the start, and every row takes from it.",
           "A preempted sequence forgets its blocks and begins at 0: its length stays, so it computes what it "
           "had drawn too."),
    differences="The shipped scheduler shares blocks between choices (copy on write), finds cached prefixes, "
    "plans a step "
    "before the tokens of the last are known, and sizes steps by a time target.",
    shipped="engine/scheduling/scheduler.py",
    live=Live("serve", {"--scheduler-cls": _live},
              ("--no-prefix-caching", "--no-async-scheduling", "--mixed-step-limit", "full",
               "--kv-cache-tokens", "4096", "--max-num-seqs", "8", "--max-num-batched-tokens", "64",
               "--max-model-len", "1024")),
)  # fmt: skip
