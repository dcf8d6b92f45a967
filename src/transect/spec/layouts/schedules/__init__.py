"""Pipeline schedules, one file each, found by their records (``PipelineSchedule``).

* ``pipeline_schedule.py``: the record; ``registry.py``: all schedules by name
* ``one_forward_one_backward.py``: ``1f1b``
* ``gpipe.py``: all forward passes first
* ``interleaved.py``: several runs of layers for each rank
"""
