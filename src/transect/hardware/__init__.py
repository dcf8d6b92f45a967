"""The device that is here: detected, and measured once. ``costs/`` has the classes that these figures fill.

* ``device.py``    ``Device``: which one is here, with its driver and sizes
* ``targets.py``   kinds of GPUs to compile for: their limits, and acting as another one
* ``measured.py``  the ceilings of a device here: from the user's cache, or measured now and kept
* ``load.py``      how busy a device is with other work
* ``cache.py``     where the user's cache is
* ``cores.py``     how many CPU cores this process can keep busy
* ``cpu.py``       measures this machine's processor and memory
* ``gpu.py``       measures bandwidth, matrix rates, launch cost and the host link of a GPU
* ``topology.py``  NUMA nodes, and the links between GPUs
* ``host_memory.py``  free memory, and buffers that a GPU and a disk can read and write directly
* ``direct_file.py``  files that are read and written past the page cache, asynchronously
* ``environment.py``  machine, versions and commit, as every recorded result has them
"""
