"""Layers whose matrices are kept outside of the device, in host memory or in a file, and copied to it when they are
needed.

A model that is larger than a GPU's memory can serve from it so: each step brings every such layer over the host link
once, while the layer before it computes (ZeRO-Inference, Aminabadi et al. 2022, arXiv:2207.00032). A step then takes as
long as that link needs for their bytes, however many tokens it has; large batches share it. ``costs/memory/streaming``
chooses the layers.

* ``placed.py``: the matrices of a layer in one piece of memory, whatever kinds of ``Weight`` they are
* ``homes.py``: where layers live: pinned host memory, or a file that is read ahead of its use
* ``stream.py``: ``LayerStream``, which has a layer there when its turn comes
"""
