"""Optimizers.

* ``adamw.py``     one AdamW step over all tensors
* ``rounding.py``  float32 to bfloat16 by chance, for weights that small steps would not move
"""
