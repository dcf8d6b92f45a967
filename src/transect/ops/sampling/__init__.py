"""From logits to tokens.

* ``adjust_logits.py``  bias, masks and penalties; ``mask_logits.py``: the masks of grammars
* ``sampling.py``       the next token of every row, drawn on the device; its kernels in ``triton.py``
"""
