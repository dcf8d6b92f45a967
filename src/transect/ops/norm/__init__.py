"""Normalisation.

* ``rms_norm.py``, ``layer_norm.py``
* ``add_rms_norm.py``: RMSNorm with the residual added in the same kernel
* ``norms.py``: what the three share
"""
