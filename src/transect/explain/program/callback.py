"""A callback that explains a window of steps in transformers' ``Trainer`` and in Lightning's.

    trainer = Trainer(..., callbacks=[ExplainCallback()])
    trainer = lightning.Trainer(..., callbacks=[ExplainCallback()])

Both call methods of it by name; those of the other are not called. Neither library is imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .explain import Explain
from .report import Explanation


class ExplainCallback:
    """Explains training while it runs: steps are found, timed plain, and a window of them is profiled.

    Args:
        window_s: seconds of steps that are profiled.
        report: called with the explanation when training ends; by default it is printed.
        options: of ``Explain``.
    """

    def __init__(self, window_s: float = 3.0, report: Callable[[Explanation], object] = print, **options: Any) -> None:
        self._run: Explain | None = None
        self._report = report
        self._options = {"window_s": window_s, **options}
        self.result: Explanation | None = None

    def _begin(self) -> None:
        if self._run is None:
            self._run = Explain(**self._options)
            self._run.__enter__()

    def _end(self) -> None:
        if self._run is not None:
            self._run.__exit__(None, None, None)
            self.result, self._run = self._run.result, None
            assert self.result is not None
            self._report(self.result)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start explaining; called by Trainer."""
        self._begin()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Finish explaining; called by Trainer and Lightning."""
        self._end()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Start explaining; called by Lightning."""
        self._begin()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """End without a report after an exception; called by Lightning."""
        if self._run is not None:
            self._run.__exit__(type(exception), exception, None)
            self._run = None

    def __getattr__(self, name: str) -> Any:
        """Return a function that does nothing, for every other event of either library."""
        if name.startswith("on_") or name in ("setup", "teardown"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing for Lightning to save."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignore the state that Lightning restores."""

    @property
    def state_key(self) -> str:
        """Name of the callback in Lightning."""
        return type(self).__qualname__
