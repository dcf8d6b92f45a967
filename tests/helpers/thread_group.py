"""Ranks as threads of one process: what needs a ``Group`` and no processes."""

import threading

import torch


class ThreadGroup:
    """The collectives of ``parallel.group.Group`` between threads."""

    def __init__(self, rank, size, shared):
        self.rank, self.size, self._shared = rank, size, shared
        self.ranks = tuple(range(size))

    def _everybody(self, x):
        barrier, slots = self._shared
        slots[self.rank] = x.clone()
        barrier.wait(200)
        found = list(slots)
        barrier.wait(200)
        return found

    def all_reduce(self, x):
        return x.copy_(torch.stack(self._everybody(x)).sum(0))

    def start_all_reduce(self, x):
        return Came(self.all_reduce(x))

    def all_gather(self, x):
        return torch.stack(self._everybody(x))

    def reduce_scatter(self, x):
        return torch.stack(self._everybody(x)).sum(0).chunk(self.size)[self.rank].clone()

    def start_gather(self, out, x):
        out.copy_(torch.cat(self._everybody(x)))

    def start_scatter(self, out, x):
        out.copy_(self.reduce_scatter(x))

    def start_shift(self, x):
        return Came(self._everybody(x)[self.rank - 1])

    def all_to_all(self, x):
        return torch.cat([part.chunk(self.size)[self.rank] for part in self._everybody(x)])


class Came:
    """What a rank has got."""

    def __init__(self, x):
        self.x = x

    def wait(self):
        return self.x


def on_threads(size, work):
    """``work(group)`` on each rank; the results in their order."""
    shared = threading.Barrier(size), [None] * size
    results, errors = [None] * size, []

    def run(rank):
        try:
            results[rank] = work(ThreadGroup(rank, size, shared))
        except BaseException as error:
            errors.append(error)
            shared[0].abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    if errors:
        raise errors[0]
    return results
