"""Policies of the scheduler and the router, in plain Python: engine, planner and cluster run the same ones.

* ``order``: who comes next: shares of clients, and levels of requests, which ``orders/`` gives: a scheduling policy a
  file.
* ``registry``: the record of a decision: its functions, and settings under which an engine makes it often.
* ``places``: a client below its share of places gets one of a client above.
* ``turns``: sequences of a client take turns, where all of them would make steps long for others; the part of a step
  that prompts of one client may take beside streams of others.
* ``admission``: who may join the queue, by bytes and predicted wait.
* ``budget``: tokens per step while sequences decode. ``costs/learning`` learns step times.
* ``filling``: prefill in small chunks beside decoding sequences.
* ``speculation``: the number of tokens to draft for each sequence. ``model_speculation``: the same where a model
  drafts, which takes time.
* ``routing``: the replica that gets a request, by cached prefix and load.
* ``scaling``: the number of engines, from queue, load or a forecast.
"""
