"""Where to begin: small operators with every part of a large one.

* ``vector_add.py`` (``vector_add.cu``)  the smallest operator with every part
* ``sum.py`` (``sum.cu``), ``dot.py``    reductions
* ``softmax.py``           over the last dimension; ``softmax_kernels.py``: its device code
* ``matmul_ladder.py`` (``matmul.cu``)   a matrix product in CUDA C++, rung by rung from naive to tensor cores
"""
