"""Products of many rows, bound by arithmetic.

* ``matmul.py``  the operator, with fused epilogues and gradients
* ``triton.py``  its device code
* ``tiling.py``  how a product is cut into tiles
"""
