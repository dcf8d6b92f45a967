"""Products of up to 256 rows, bound by the bytes of the weight.

* ``small_matmul.py``  the operator, and which kernel runs
* ``choices.py``       which kernel runs a size: measured, or by its shape
* ``rule.py``          the time of a tiling, from the shape
* ``search.py``        measures which kernel is quickest on this GPU
* ``triton.py``        its Triton kernels
* ``gluon.py``         small weights on Hopper, read before the input is there
* ``cuda.py`` (``small_matmul.cu``, ``small_rows.cuh``)  up to 16 rows, or 32 of a small weight
* ``invariant.py``     products whose rows do not depend on each other, by tilings of ``hopper.py``
* ``hopper.py`` (``small_matmul_hopper.cu``, ``hopper_rows.cuh``)  from 17 rows on Hopper
"""
