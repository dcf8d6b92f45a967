"""Derive tools from the registry, without naming any operator.

* ``accuracy.py``  every implementation against float64, beside the error of torch's own operator
* ``bench.py``     measured time beside its floor and its peers; ``bench_run.py``, ``bench_worker.py``: in a process
  that may fail; ``timing.py``: how one call is timed; ``under_load.py``: races at the clock that work leaves the GPU;
  ``results.py``: the file of rows; ``plots.py``
* ``compile.py``   compiles kernels ahead of time for a GPU that need not be there, and reads the result
  (``machine_code.py``); ``inspection.py``: the table of ``transect inspect``
* ``search.py``    tries a launcher's knobs on the device; ``search_worker.py`` compiles for it
* ``trace.py``     which program touches which tile, in the interpreter; ``trace_view.py`` draws it
* ``reference.py`` the reference page of the docs
"""
