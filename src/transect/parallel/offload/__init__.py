"""What a run or an engine keeps outside the device's memory.

* ``pinned.py``: ``host_memory``, aligned and, for a GPU, pinned; ``Ring``, buffers through which much passes to or from
  a device
* ``files.py``: ``DirectFile``, read and written past the page cache by a team of threads
"""
