"""Search methods, one file each, found by their records (``METHOD``).

* ``registry``: the record, ``SearchMethod``, and all methods by name.
* ``steps``: parts that methods share.
* ``best_of_n``: the answer with the highest score.
* ``majority``: the most frequent short answer.
* ``weighted_majority``: votes weigh as much as scores.
* ``adaptive``: a majority vote that stops when it is decided.
* ``confident``: a vote from which unlikely branches are dropped early.
* ``beam``: the best beginnings after each step of reasoning.
* ``refine``: criticism and a second answer.
* ``mixture``: proposals of several adapters, combined.
"""
