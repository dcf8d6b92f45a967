"""What a run or an engine keeps outside the device's memory.

* ``pinned.py``: ``host_memory``, aligned and, for a GPU, pinned; ``Ring``, buffers through which much passes to or from
  a device
* ``files.py``: ``DirectFile``, read and written past the page cache by a team of threads

For training:

* ``groups.py``: the numbers of many parameters, cut into groups that are moved together
* ``states.py``: an optimizer's states, in host memory or on a disk
* ``drain.py``: gradients on their way to host memory; ``upload.py``: new weights on their way back
"""
