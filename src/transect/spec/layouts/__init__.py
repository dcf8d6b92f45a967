"""Layouts of models over ranks, for serving and training, in plain arithmetic without torch.

* ``ranks.py``: ``RankLayout``, the sizes of the axes, and the place of each rank
* ``shards.py``: ``Shard``, the rows, columns and layers of every weight that a rank has
* ``spread.py``: ``Spread``, the layout of a training run
* ``schedule.py``: pipeline schedules as data, and their simulation; ``schedules/``: their kinds, one file each
* ``picture.py``: a layout as plain values for drawings
* ``refusals.py``: why a run cannot be spread so, and the nearest layout that can be
"""
