"""Explain any PyTorch program: its wall time by cause, and changes that save time.

* ``explain``: ``Explain``, the context manager, and scripts; ``script`` runs one as ``python`` would, ``timing``
  without profiling.
* ``steady``: the windows of a run, from ``steps``: the step that repeats. ``recording``: profiler and ``sampler``
  (Python stacks) during one.
* ``job``: several processes, as ``torchrun`` starts them; ``child``: each explains itself.
* ``trace_file``: reads traces piece by piece; ``nsight``: exports of Nsight Systems. ``trace``: their events as columns
  of numbers.
* ``split``: the wall time by cause; ``overhead``: what profiling cost. ``op_floor``: the least time of an operator;
  ``signatures``: PyTorch's schemas. ``stretches``: innermost events; times of loading and compilation. ``gaps``: causes
  of idle time, from ``doing``: activity of a Python stack.
* ``findings``: changes by predicted gain; ``findings_host``: on the host; ``findings_calls``: fewer calls of operators;
  ``findings_work``: needless work; ``finding``: one of them. ``libraries``: switches of libraries, and the line that
  calls them. ``callback``: a window of steps in Trainer and Lightning.
* ``report``: ``Explanation``, as text and JSON; ``report_html``: as a page.
* ``changes``: changes that need no edit of the script; ``switches``: what they switch off. ``apply``: makes them, and
  measures again.
"""
