"""Captures: requests and answers of consenting clients, kept for quality, with feedback on them.

* ``slips``: content of a request and its answers on its way to the files. ``redaction``: rules that replace secrets.
* ``recorder``: the thread that writes. ``captures``: consent, sampling and metrics.
* ``routes``: ``/v1/feedback`` and the operator's ``/v1/captures``.

The module ``captures`` of ``flow/watch`` describes the files.
"""
