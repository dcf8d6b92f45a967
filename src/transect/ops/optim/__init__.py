"""Optimizers.

* ``adamw.py``  one AdamW step over all tensors
"""
