"""What a model needs in memory, for training and for serving, before the device is touched (no torch).

* ``terms.py``: named terms, phases, an ``Estimate`` of both
* ``kept.py``: what the gradients of a layer's operators keep of the forward pass
* ``merged.py``: the same where a layer is one node in training
* ``training_plan.py``: a way to train, what it trains, what its optimizer holds
* ``part.py``: what one rank of several has of a model, and how it holds gradients
* ``training.py``: a training step: weights, gradients, optimizer, activations, loss, temporaries, by phase
* ``fit.py``: whether it fits, and the smallest change with which it does
* ``serving.py``: an engine: weights, KV cache, the largest step, graphs
"""

from __future__ import annotations
