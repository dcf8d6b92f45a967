r"""For a whole network the chain rule is too long to write out. `loss.backward()` does it, and it is about a
hundred lines.

Each number becomes a `Value` that remembers how it was made: which values went in (`parents`), and how a slope at
its output becomes slopes at its inputs (`local`, one slope for each parent). `a * b` is a Value with the parents a
and b, and the local slopes b and a. (Both sides of an operation are Values here, and `backward` is called once for a
graph.) So while you compute, a graph grows by itself.

`backward()` then walks the graph from the end to the beginning. The end has the slope 1. Each value hands `its
slope * local slope` to each parent, which *adds it up*: a value that is used twice gets two slopes, and both count.

The order is the whole trick. A value may hand its slope on only when it is complete, that is after everybody who
used it has handed theirs. So sort the graph first, parents before children (a depth-first walk that notes a value
after its parents), and go through the list backwards. Without the sort, following every path from the end also
gives the right sums, but the number of paths doubles with every value that is used twice: 30 such values in a row
are a billion paths. The grader counts lines, and will notice.

The grader builds graphs step by step: `graph([2, 3], [["mul", 0, 1], ["tanh", 2]])` begins with the values 2 and 3,
multiplies values 0 and 1, takes the tanh of value 2, and calls `backward()` on the last one.

torch does the same with tensors in place of numbers, and frees what a node kept when the node is done.
"""

import math

import torch

from ...record import Case, Rung, Speed

SOLUTION = '''import math


class Value:
    """A number that remembers how it was made. ``grad`` is filled in by ``backward``."""

    def __init__(self, data, parents=(), local=()):
        self.data = data
        self.grad = 0.0
        self.parents = parents
        self.local = local

    def __add__(self, other):
        return Value(self.data + other.data, (self, other), (1.0, 1.0))

    def __mul__(self, other):
        return Value(self.data * other.data, (self, other), (other.data, self.data))

    def __sub__(self, other):
        return Value(self.data - other.data, (self, other), (1.0, -1.0))

    def tanh(self):
        t = math.tanh(self.data)
        return Value(t, (self,), (1 - t * t,))

    def exp(self):
        e = math.exp(self.data)
        return Value(e, (self,), (e,))

    def relu(self):
        return Value(max(self.data, 0.0), (self,), (1.0 if self.data > 0 else 0.0,))

    def backward(self):
        """Set ``grad`` of this value and of all that it was made from."""
        order, seen, stack = [], set(), [(self, False)]
        while stack:
            node, done = stack.pop()
            if done:
                order.append(node)
            elif id(node) not in seen:
                seen.add(id(node))
                stack.append((node, True))
                stack.extend((parent, False) for parent in node.parents)
        self.grad = 1.0
        for node in reversed(order):
            for parent, slope in zip(node.parents, node.local):
                parent.grad += node.grad * slope
'''


def _drive(module, leaves, program):
    values = [module.Value(each) for each in leaves]
    for name, *places in program:
        if name in ("add", "mul", "sub"):
            a, b = (values[place] for place in places)
            values.append(a + b if name == "add" else a * b if name == "mul" else a - b)
        else:
            values.append(getattr(values[places[0]], name)())
    values[-1].backward()
    return {"data": [float(each.data) for each in values], "grad": [float(each.grad) for each in values]}


def _answer(leaves, program):
    values = [torch.tensor(each, dtype=torch.float64, requires_grad=True) for each in leaves]
    for name, *places in program:
        given = [values[place] for place in places]
        values.append(getattr(torch, name)(*given))
    slopes = torch.autograd.grad(values[-1], values, allow_unused=True)
    return {"data": [v.item() for v in values], "grad": [0.0 if s is None else s.item() for s in slopes]}


def _random(rng, leaves, length):
    program, size = [], leaves
    for _ in range(length):
        name = str(rng.choice(["add", "mul", "sub", "tanh", "relu"]))
        places = [int(each) for each in rng.integers(0, size, 2 if name in ("add", "mul", "sub") else 1)]
        program.append([name, *places])
        size += 1
    program.append(["tanh", size - 1])
    return [[float(each) for each in rng.uniform(-1, 1, leaves)], program]


def _chain(rng, length):
    program = [["add", place, place] for place in range(length)]
    return [[float(rng.uniform(-1, 1)) / 2**length], program]


RUNG = Rung(
    name="autograd",
    title="loss.backward() in a hundred lines",
    road="arithmetic",
    place=4,
    kind="python",
    minutes=60,
    after=("chain_rule",),
    solution=SOLUTION,
    holes=("Value.__add__", "Value.__mul__", "Value.__sub__", "Value.tanh", "Value.exp", "Value.relu",
        "Value.backward"),
    answers={"graph": _answer},
    drives={"graph": _drive},
    tolerance=1e-9,
    cases=(
        Case("a + b", lambda rng: [[2.0, 3.0], [["add", 0, 1]]],
             "A sum hands its slope on to both: local slopes 1 and 1, and the end itself has the slope 1."),
        Case("a * b", lambda rng: [[2.0, 3.0], [["mul", 0, 1]]], "Each factor's local slope is the other factor."),
        Case("a - b", lambda rng: [[2.0, 3.0], [["sub", 0, 1]]], "The second of a difference has the local slope -1."),
        Case("tanh, exp and relu", lambda rng: [[math.pi / 7], [["tanh", 0], ["exp", 1], ["relu", 2]]],
             "tanh' = 1 - tanh^2, exp' = exp, relu' = 1 above 0; and walk from the end to the beginning."),
        Case("a * a", lambda rng: [[3.0], [["mul", 0, 0]]],
             "A value that is used twice gets both slopes: add to grad, never assign it."),
        Case("used in two places", lambda rng: [[0.5], [["tanh", 0], ["exp", 0], ["mul", 1, 2], ["add", 3, 0]]],
             "A value hands its slope on when it is complete: sort the graph, and walk it backwards."),
        Case("a random graph", lambda rng: _random(rng, 4, 25),
             "Sort depth first, note each value after its parents and once only, and go through that list backwards."),
        Case("3,000 values in a row", lambda rng: [[0.5], [["tanh", place] for place in range(3000)]],
             "Recursion has an end at 1,000 calls in Python: walk the graph with a list as the stack."),
    ),
    speed=Speed(lambda rng: _chain(rng, 12),
                "Each value must hand its slope on once. Following every path visits a shared value as often as there "
                "are paths, which doubles with every value that is used twice.", ratio=2.0),
    hints=("Every operation returns Value(result, parents, local slopes); backward is the same for all of them.",
           "Walk depth first with a stack; a second visit of a pair (node, True) notes it after its parents.",
           "for node in reversed(order): for parent, slope in zip(node.parents, node.local): parent.grad += "
           "node.grad * slope"),
    differences=
        "torch's engine keeps a count of users for each node instead of sorting first, runs devices in threads of "
    "their own, and frees what a node has kept. `transect explain` shows what loss.backward() does, call by call.",
    shipped="explain/backward/graph.py",
)  # fmt: skip
