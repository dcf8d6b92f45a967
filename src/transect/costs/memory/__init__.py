"""Accounts of memory, for training and for serving, before a device is touched.

* ``terms.py``: named terms, phases, an ``Estimate`` of both
* ``serving.py``: an engine: weights, KV cache, the largest step, graphs; each rank of a layout, the smallest that fits
* ``measured.py``: the account that an engine measures on a GPU
* ``streaming.py``: layers that stream from the host or a disk
* ``training_plan.py``: ``TrainingPlan``, a way to train, its trained weights and optimizer state
* ``training.py``: a training step: weights, gradients, optimizer, activations, loss, temporaries, by phase
* ``kept.py``: tensors that a layer keeps for its gradients; ``merged.py``: of a layer that is one node
* ``part.py``: the part of a model that one rank of several has, and its gradients
* ``training_ranks.py``: the account of each rank of a layout
* ``fit.py``: whether a run fits, and the smallest change with which it does
* ``shared.py``: memory that GPUs share for sums
* ``sizes.py``: sizes of the pieces in which training computes
"""
