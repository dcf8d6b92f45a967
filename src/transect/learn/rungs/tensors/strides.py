r"""Memory is one long row. A tensor of any shape is that row, an *offset* (where it begins) and one *stride* for each
dimension: how many elements to go forward for the next index. Element (i, j) of a matrix lies at

    offset + i * stride[0] + j * stride[1]

A fresh tensor of the shape [3, 4] has the strides [4, 1]: rows follow each other, the last index is the fastest
(*row-major*, or contiguous). So the stride of a dimension is the product of the sizes after it.

Now look at what becomes free. Transposing swaps two sizes and two strides; no element moves. A slice
`[start:stop:step]` moves the offset by `start * stride`, shortens the size, and multiplies the stride by `step`.
Selecting one row moves the offset and drops the dimension. Repeating a size of 1 (*broadcasting*) sets its stride
to 0: every index reads the same place. All of these are *views*: they share memory, and writing to one changes the
other.

It is not free later. A kernel that reads along a dimension with a large stride uses 4 of the 32 bytes of each
sector that the memory hands out. So some code calls `contiguous()`, which copies the elements into order, and that
is a read and a write of everything. When a view is enough and when a copy pays is a question that you will meet on
every rung.
"""

import torch

from ...record import Case, Rung, Speed

SOLUTION = '''class View:
    """A window on a flat list: element (i, j, ...) is data[offset + i * strides[0] + j * strides[1] + ...]."""

    def __init__(self, data, shape, strides=None, offset=0):
        self.data = data
        self.shape = list(shape)
        self.strides = contiguous_strides(shape) if strides is None else list(strides)
        self.offset = offset

    def transpose(self, a, b):
        """The view with dimensions a and b swapped."""
        shape, strides = list(self.shape), list(self.strides)
        shape[a], shape[b] = shape[b], shape[a]
        strides[a], strides[b] = strides[b], strides[a]
        return View(self.data, shape, strides, self.offset)

    def slice(self, dim, start, stop, step):
        """The view of start, start + step, ... below stop along one dimension; 0 <= start <= stop, step >= 1."""
        shape, strides = list(self.shape), list(self.strides)
        shape[dim] = -(-(min(stop, shape[dim]) - start) // step)
        strides[dim] = strides[dim] * step
        return View(self.data, shape, strides, self.offset + start * self.strides[dim])

    def select(self, dim, index):
        """The view without one dimension, at one of its indices."""
        shape, strides = list(self.shape), list(self.strides)
        offset = self.offset + index * strides[dim]
        del shape[dim], strides[dim]
        return View(self.data, shape, strides, offset)

    def expand(self, shape):
        """The view with sizes of 1 repeated to the sizes of ``shape``, which has as many dimensions."""
        strides = [0 if old == 1 and new != 1 else stride for old, new, stride in zip(self.shape, shape, self.strides)]
        return View(self.data, shape, strides, self.offset)

    def is_contiguous(self):
        """True if the elements lie in order without gaps; sizes of 1 may have any stride."""
        expected = contiguous_strides(self.shape)
        return all(size == 1 or a == b for size, a, b in zip(self.shape, self.strides, expected))

    def elements(self):
        """All elements in order, a flat list."""
        places = [self.offset]
        for size, stride in zip(self.shape, self.strides):
            places = [place + i * stride for place in places for i in range(size)]
        return [self.data[place] for place in places]


def contiguous_strides(shape):
    """Strides of a fresh row-major tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return strides
'''


def _drive(module, data, shape, program):
    view = module.View(data, shape)
    for name, *arguments in program:
        view = getattr(view, name)(*arguments)
    return {
        "shape": list(view.shape),
        "strides": list(view.strides),
        "offset": view.offset,
        "is_contiguous": bool(view.is_contiguous()),
        "elements": list(view.elements()),
    }


def _answer(data, shape, program):
    view = torch.tensor(data).view(shape)
    for name, *arguments in program:
        if name == "slice":
            dim, start, stop, step = arguments
            view = view[(slice(None),) * dim + (slice(start, stop, step),)]
        else:
            view = getattr(view, name)(*arguments)
    return {
        "shape": list(view.shape),
        "strides": list(view.stride()),
        "offset": view.storage_offset(),
        "is_contiguous": view.is_contiguous(),
        "elements": view.flatten().tolist(),
    }


def _case(name, teaches, shape, *program):
    def make(rng):
        count = int(torch.tensor(shape).prod())
        return [[int(each) for each in rng.integers(-99, 99, count)], list(shape), [list(each) for each in program]]

    return Case(name, make, teaches)


RUNG = Rung(
    name="strides",
    title="Tensors are one row of memory: strides and views",
    road="tensors",
    place=1,
    kind="python",
    minutes=40,
    after=("line",),
    solution=SOLUTION,
    holes=("View.transpose", "View.slice", "View.select", "View.expand", "View.is_contiguous", "View.elements",
           "contiguous_strides"),
    answers={"view": _answer},
    drives={"view": _drive},
    cases=(
        _case("a matrix", "The stride of a dimension is the product of the sizes after it; the last is 1.", (3, 4)),
        _case("four dimensions",
              "Go through the sizes from the last to the first, and multiply as you go.", (2, 3, 4, 5)),
        _case("transposed", "Swap the sizes and the strides, and move nothing.", (3, 4), ("transpose", 0, 1)),
        _case("a slice", "A slice moves the offset by start * stride; a step multiplies the stride.", (7, 5),
              ("slice", 0, 1, 7, 2)),
        _case("a slice of a slice", "The second slice starts from the offset and the strides of the first.", (9, 4),
              ("slice", 0, 1, 9, 2), ("slice", 0, 1, 3, 1)),
        _case("a slice with a ragged end", "Count start, start + step, ... below stop: round the number up.", (10, 2),
              ("slice", 0, 0, 10, 3)),
        _case("one column", "Selecting moves the offset by index * stride and drops the dimension.", (4, 6),
              ("select", 1, 2)),
        _case("repeated", "A repeated size of 1 has the stride 0: every index reads the same place.", (1, 4),
              ("expand", [3, 4])),
        _case("a size of 1", "A size of 1 is never stepped along, so its stride does not matter.", (4, 1, 3),
              ("transpose", 0, 1)),
        _case("all together", "Each view starts from the one before: use its shape, strides and offset.", (4, 1, 6),
              ("slice", 2, 1, 6, 2), ("transpose", 0, 2), ("expand", [3, 5, 4]), ("select", 2, 3)),
    ),
    speed=Speed(_case("", "", (20, 30, 4), ("transpose", 0, 2), ("slice", 1, 0, 30, 2), ("transpose", 0, 1),
                      ("select", 0, 3)).make,
                "A view must not copy: change shape, strides and offset, and look at the elements only in elements().",
                ratio=1.5),
    hints=("Write contiguous_strides first; everything else begins with list(self.shape) and list(self.strides).",
           "The length of a slice is -(-(stop - start) // step), with stop at most the size.",
           "expand: stride 0 where a size of 1 becomes larger, the old stride everywhere else."),
    differences="torch adds a dtype, a device and a storage that counts who uses it, and negative indices. Transect's "
    "kernels take strides as arguments where a copy would cost more than the uneven read.",
    shipped="ops/norm/norms.py",
)  # fmt: skip
