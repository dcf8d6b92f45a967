"""What a run did, why it took as long as it did, and what to change.

The engine, from its decision log:

* ``log``: a decision log as it is read: steps, rows, requests. ``sources``: from a file or a server.
* ``work``: what its steps had to compute, and their floors. ``rates``: of which device.
* ``bill``: where a request's time went.
* ``replay``: the log through the shipping scheduler again, decision by decision.
* ``calibration``: step times of a log, and the model of ``costs/fitting`` fitted on them. ``simulate``: the requests
  of a log on a virtual clock, with something changed. ``what_if``: that from the command line.
* ``live``: what a running server does now.

Any PyTorch program:

* ``program``: ``Explain``, the context manager, and scripts; ``script`` runs one as ``python`` would. ``sampler``: what
  Python does meanwhile.
* ``trace_file``: reads traces piece by piece. ``trace``: their events as columns of numbers.
* ``split``: the wall time by cause. ``op_floor``: the least time of an operator; ``signatures``: what PyTorch says of
  it. ``stretches``: when data is loaded or code compiled. ``gaps``: names for what lies between, by ``doing``: what a
  Python stack says.
* ``findings``: what to change, by predicted gain; ``findings_host``: on the host; ``finding``: what one is.
* ``report``: ``Explanation``, all of it, as text and JSON; ``report_html``: as a page.
* ``changes``: what can be changed from outside of a script. ``apply``: does it, and measures again.
* ``energy``: joules, kWh and CO2e of a run.
* ``roofline``: what a device allows, for a model, an operator, a trace. ``roofline_svg``: its picture.

A backward pass:

* ``backward``: the nodes of the graph behind a loss: what each saved, how many bytes, how long it took.
* ``backward_text``: the same as lines of text.
* ``losses``: which losses can be explained: a model's, or a Python file's.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .program import Explain

__all__ = ["Explain"]


def __getattr__(name: str) -> Any:
    """``Explain``, without importing torch for those who do not ask for it."""
    if name == "Explain":
        from .program import Explain

        return Explain
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
