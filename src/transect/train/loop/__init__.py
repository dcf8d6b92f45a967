"""The training loop and its state.

* ``trainer.py``: the loop. ``crew.py``: the ranks that train together, as the loop sees them; ``strategies/``: the ways
  that they share a step; ``follow.py``: the start of ranks, and the part of all but the first.
* ``schedule.py``: the learning rate. ``health.py``: NaN and loss spikes. ``memory.py``: the memory of a run, and the
  checkpointing of activations that makes it fit.
* ``checkpoint.py``: atomic, asynchronous, checksummed directories; ``parts.py``: of several ranks;
  ``stored_state.py``: their tensors. ``best.py``: the best checkpoint, and early stopping.
* ``report.py``: progress, JSONL and TensorBoard logs; ``curves.py`` draws them; ``overview.py``: a run as
  data for pages; ``trackers.py``: Weights & Biases,
  MLflow. ``samples.py``: answers during training. ``sweep.py``: runs over a grid of settings.
"""
