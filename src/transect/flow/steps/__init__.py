"""Steps of a flow, one file each, found by their records.

* ``step.py``: the interface. ``registry.py`` finds the steps.
* In the order of the chain: ``data.py``, ``train.py``, ``gate.py``, ``register.py``, ``release.py``, ``watch.py``,
  ``promote.py``.
"""
