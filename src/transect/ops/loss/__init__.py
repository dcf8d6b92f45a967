"""The loss of a language model.

* ``linear_cross_entropy.py``  head and cross entropy in one operator: the logits of all tokens are never held
* ``linear_cross_entropy_torch.py``, ``linear_cross_entropy_cpu.py``: the same without a GPU
"""
