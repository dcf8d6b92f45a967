"""The life of a model, from data to a release and back.

* ``watch/``: captured requests and answers: their files, drift, and pairs from feedback.
"""
