"""Test-time search: more compute for one answer. Methods are generators of steps that run in an engine.

* ``settings``: ``Search``, the settings of a search.
* ``tree``: branches, and the actions extend, score and drop.
* ``methods/``: one file a method.
* ``machine``: a search as a state machine in virtual time.
* ``local``, ``streams``: run searches in an ``LLM``, or over an engine's streams.
* ``judges``: sources of scores. ``programs``: functions of the operator's, in a process with limits.
* ``extract``: short answers in texts.
* ``result``: the answer and its tree.
* ``report``: accuracy with intervals, and the gain over one answer.
"""
