"""The model of a run.

* ``build.py``: the model, built or loaded, and the parameters to train. ``new_tokens.py``: tokens that its vocabulary
  lacks.
* ``merged_layers.py``: a layer as one node with a hand-written backward pass, on a GPU; ``merged_products.py``: its
  products, with adapters inside.
* ``merging.py``: models that can have them.
* ``activations.py``: tensors that the backward pass keeps. ``layer_drop.py``: layers that are left out of steps.
"""
