"""From logits to tokens.

* ``adjust_logits.py``  bias, masks and penalties
* ``sampling.py``       the next token of every row, drawn on the device; its kernels in ``triton.py``
"""
