"""Normalisation, with and without the residual added first.

* ``rms_norm.py``, ``layer_norm.py``
* ``add_rms_norm.py``, ``add_layer_norm.py``: the residual is added in the same kernel
* ``norms.py``  what the four share
"""
