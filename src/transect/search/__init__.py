"""Test-time search: more compute for one answer. Methods are generators of steps that run in an engine.

* ``settings``: ``SearchSettings``, the settings of a search.
* ``tree``: branches, and the actions extend, score and drop.
* ``methods/``: one file a method.
* ``machine``: a search as a state machine in virtual time. ``prices``: the cost of one more branch.
* ``local``: ``Search``, and searches in an ``LLM``. ``streams``: searches over an engine's streams.
* ``rows``: training data from searches.
* ``judges``: sources of scores. ``programs``: functions of the operator's, in a process with limits.
* ``extract``: short answers in texts.
* ``result``: the answer and its tree, also while it grows.
"""
