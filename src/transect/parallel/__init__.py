"""Run one model on several ranks. A rank is a process with a device of its own.

``spec/layouts/`` describes layouts, shards and schedules without torch, ``costs/memory/`` the memory of each rank.

Ranks:

* ``launch.py``: ``Ranks``, started as children of this process (``children.py``) or by ``torchrun`` (``gathering.py``
  names each start); ``rank.py``: the program of a child
* ``world.py``: ``World``, messages between all ranks; ``mesh.py``: ``Mesh``, the ranks in a layout; ``group.py``:
  ``Group``, the ranks along one axis, and their collectives
* ``shared_memory.py``: memory that the GPUs of a group read and write; ``peer_sums.py``: all-reduce kernels on it;
  ``shared_sums.py``: times them against NCCL and keeps the faster; ``spread_logits.py``: sampling from sharded logits

A model on several ranks:

* ``tensor.py``: kinds of ``Weight`` around a shard, and an embedding sharded by vocabulary
* ``experts.py``: ``ExpertRanks``, collectives of a layer with sharded experts; ``exchange.py``: all-to-all of tokens
* ``load.py``: loads a rank's part of a model

Training on several ranks:

* ``parallelize.py``: ``parallelize(model, mesh, plan)``, the entry point; ``plan.py``: ``ParallelPlan``
* ``replicas.py``: data parallelism with ZeRO 1 and 2, gradients summed in buckets; ``gradient_sums.py``: sums over
  micro-batches; ``table_rows.py``: the gradient of a table that embedding and head share
* ``sharded.py``: ZeRO 3, weights gathered layer by layer; ``sharded_unit.py``: the unit that is gathered; ``tiled.py``:
  matrices gathered in tiles
* ``pipeline.py``: runs a pipeline schedule; ``differentiable.py``: collectives with gradients; ``split_loss.py``: cross
  entropy over a sharded vocabulary
* ``ring.py``: context parallelism by ring attention; ``ring_pairs.py``: the queries and keys that see each other;
  ``ring_kernels.py``: ring attention with the attention kernels of a GPU
* ``compressed.py``: 1-bit sums with error feedback; ``peer_copies.py``: sums of gradients by copy engines, during the
  backward pass; ``peer_pieces.py``: sharded weights read by copy engines
* ``pulse.py``: the watchdog that ends a hanging run and reports the progress of each rank
* ``part_names.py``: names of parts of a tensor in checkpoint files
* ``offload/``: state in pinned host memory and in files
"""
