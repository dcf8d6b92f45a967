"""Mixture of experts, in the order of a layer. Every shape follows from tokens, choices and experts, never from values.

* ``router.py``          a score of each expert for each token
* ``gating.py``          which experts a token goes to, and with what weight
* ``ordering.py``        the rows of a step sorted by expert
* ``routing.py``         both, in one launch where tokens are few
* ``grouped_linear.py``  a product that takes each row's expert; its kernels in ``triton.py``
* ``grouped_gate_up.py``  gate and up of each row's expert, and the gate, in one launch
* ``grouped_scaled8.py``  the product with experts of 8 bits, decoded in it
* ``grouped_blocks.py``  the same with experts of 4 bits, in groups or in blocks such as MXFP4
* ``combining.py``       the weighted sum of the outputs of a token's experts
"""
