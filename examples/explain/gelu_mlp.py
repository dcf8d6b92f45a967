"""One MLP with GELU, two ways, operator by operator and with a fused activation, each beside its floor.

    python examples/explain/gelu_mlp.py

The eager version writes GELU out as users do, so its intermediate results go through memory five times. The second
uses torch's own GELU, one kernel. Each is explained in turn, on a GPU if there is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from transect.explain import Explain

ROWS, DIM, HIDDEN, STEPS = 256, 256, 1024, 10


def written_out(x: Tensor) -> Tensor:
    """GELU's tanh form, operator by operator."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


def fused(x: Tensor) -> Tensor:
    """The same in one kernel."""
    return torch.nn.functional.gelu(x, approximate="tanh")


def explained(name: str, activation: Callable[[Tensor], Tensor], device: str) -> Tensor:
    """Run and explain one version; its result."""
    generator = torch.Generator().manual_seed(0)
    x, up, down = (
        torch.randn(shape, generator=generator).to(device) for shape in ((ROWS, DIM), (DIM, HIDDEN), (HIDDEN, DIM))
    )

    def work() -> Tensor:
        return activation(x @ up) @ down

    with torch.inference_mode():
        work()
        with Explain() as run:
            for _ in range(STEPS):
                result = work()
    assert run.result is not None
    split = run.result.split
    calls = sum(op.calls for op in split.ops if op.floor)
    floor, wall = 1e3 * split.parts["floor"], 1e3 * split.own
    print(f"{name:12} {wall:8.2f} ms, floor of its operators {floor:6.2f} ms ({floor / wall:.0%}), {calls} operators")
    return result


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    eager = explained("written out", written_out, device)
    one = explained("one kernel", fused, device)
    torch.testing.assert_close(eager, one, rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    main()
