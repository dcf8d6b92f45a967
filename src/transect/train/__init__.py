"""Training and fine-tuning: the model of ``models/`` and the operators of ``ops/``, in a loop that survives crashes.

* ``config/``: a run as frozen dataclasses, from TOML. ``trainer.py``: the loop; start reading there.
* ``files.py``: files of training data and their rows. ``layouts.py``: layouts of rows, told apart by their keys;
  ``messages.py``: their messages.
  ``documents.py``: rows and text to token ids; ``chat.py``: with which chat template. ``checks.py``: what of a file
  can be trained on.
* ``tokens.py``: token streams and token files; ``tokenize.py`` writes them, from the ``chunks.py`` of other files;
  ``streaming.py`` reads those as the run goes. ``data.py``: files to streams, and the
  position in them. ``batches.py``: documents packed side by side; ``mixing.py``: how
  often each file's come.
* ``model.py``: the model of a run. ``lora.py``: adapters; ``qlora.py``: a 4-bit base under them. ``activations.py``:
  what the backward pass keeps. ``merged_layers.py``: a layer as one node with a hand-written backward pass, on a
  GPU; ``merged_products.py``: its products, with adapters inside.
* ``objectives/``: what a run minimises: next tokens, preferences, rewards, a teacher's distribution
  (``divergence.py``). ``rollout.py``: answers drawn by the engine;
  ``logprobs.py``: how likely they were; ``drawn.py``: in the distribution that drew them; ``rewards.py``: how good they
  are; ``answers.py``: what several optimizer steps need of them; ``reference.py``: the model as a run began.
* ``memory.py``: whether a run fits, and under which checkpointing.
  ``perplexity.py``, ``harness.py``: how good a model
  is, measured through the engine.
* ``loss.py``: the fused loss; ``balance.py``: losses that keep experts busy. ``optim/``: AdamW, 8-bit AdamW, Muon.
  ``schedule.py``: the learning rate. ``layer_drop.py``: layers that are left out of steps.
* ``checkpoint.py``: atomic, asynchronous, checksummed directories; ``parts.py``: of several ranks;
  ``stored_state.py``: their tensors. ``health.py``: NaN and loss spikes.
  ``identity.py``: what a run is of, compared when it goes on.
* ``best.py``: the best checkpoint, and early stopping. ``samples.py``: answers while training.
* ``export.py``: adapters and merged models for other programs; ``quantize.py``: models in fewer bits.
* ``crew.py``: the ranks that train together, as the loop sees them; ``share.py``: their parts of an evaluation;
  ``follow.py``: how they are started, and what all but the first do.
* ``flops.py``: useful FLOPs, for MFU. ``report.py``: progress, JSONL and TensorBoard logs; ``curves.py`` draws them.
  ``trackers.py``: Weights & Biases, MLflow. ``sweep.py``: runs over a grid of settings.
"""
