"""Registered versions of models, with their lineage.

* ``models.py``: a model on disk and its digest. ``versions.py``: versions in files, and the current one.
  ``mlflow.py``: the same versions in MLflow's registry.
"""
