"""Activations of the MLP.

* ``gelu.py`` (``gelu.cu``)  the whole vertical of GELU in one file
* ``swiglu.py``              ``silu(gate) * up``
"""
