"""Several ranks (processes, each with a device) that work together, and the ways to spread a model over them.

``spec/layouts/`` describes layouts, shards and schedules without torch, ``costs/memory/`` the memory of each rank. Here
layouts are carried out.

Ranks, for serving and training alike:

* ``launch.py``: ``Ranks``: start them as children of this process (``children.py``, no torch), or take those of
  ``torchrun`` (``gathering.py``: a name for each of its starts, no torch); ``rank.py`` is what a child runs
* ``world.py``: ``World``, this process among all ranks, and the messages between them
* ``mesh.py``: ``Mesh``, the ranks of a world in a layout; ``group.py``: ``Group``, the ranks along one axis, and their
  collectives
* ``shared_memory.py``: memory that the GPUs of a group read and write; ``peer_sums.py``: sums by kernels of our own
  through it; ``shared_sums.py``: makes them, and finds where they are quicker than NCCL; ``spread_logits.py``: logits
  that are drawn from where they are

A model on them:

* ``experts.py``: ``ExpertRanks``, what a mixture of experts asks of the ranks that share it; ``exchange.py``: tokens
  that go to their experts alone, and back
* ``tensor.py``: kinds of ``Weight`` that stand around a shard, and an embedding that is cut by the vocabulary
* ``load.py``: a rank's part of a model, built, and filled with its slices of the files alone

Training on them:

* ``parallelize.py``: ``parallelize(model, mesh, plan)``, the one way in: this rank's part, and what it knows of others;
  ``plan.py``: ``ParallelPlan``
* ``differentiable.py``: collectives with gradients; ``split_loss.py``: cross entropy over a vocabulary that is cut
* ``pipeline.py``: runs a pipeline schedule
* ``ring.py``: context parallelism, attention whose keys and values go round; ``ring_pairs.py``: which queries see
  which keys; ``ring_kernels.py``: the same by the attention kernels of a GPU
* ``pulse.py``: what every rank is at, so that a run that hangs ends and says who waits for what
* ``compressed.py``: sums of one bit a number, whose errors are made good
* ``peer_copies.py``: sums of gradients by copy engines, beside the backward pass;
  ``peer_pieces.py``: sharded weights that other ranks read by them
* ``replicas.py``: every rank has the whole model: gradients summed in buckets, ZeRO 1 and 2; ``table_rows.py``: the
  gradient of a table that embedding and head share
* ``sharded.py``: no rank has: ZeRO 3, layer by layer; ``sharded_unit.py``: what is gathered and given back at a time;
  ``tiled.py``: matrices that come in parts
* ``part_names.py``: how ranks name parts of a tensor in files (no torch)

Beyond the memory of a device: ``offload/``, pinned host memory and files past the page cache
"""
