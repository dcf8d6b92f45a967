"""The gate of a flow: measures of a model beside the current one, each with an interval and a bar.

* ``measure.py``: the record of a measure. ``registry.py`` finds them. ``subject.py``: models under test, in one engine.
* ``perplexity.py``, ``task.py``, ``refusals.py``, ``size.py``, ``speed.py``: the measures, one file each;
  ``answering.py``: questions and checkers that several of them need; ``rates.py``: the bars of rates.
"""
