"""Scheduling policies: orders of waiting requests, one file each, found by their records (``POLICY``).

* ``registry``: the record, ``OrderPolicy``, and all policies by name.
* ``fcfs``: in the order of arrival.
* ``priority``: urgent requests first.
"""
