"""What a device can do: its measured ceilings, the numbers that every floor is computed from.

* ``ceilings.py``  ``Ceilings``: bytes per second and FLOP/s for each dtype
* ``cpu.py``       measures memory bandwidth of this machine's processor
* ``gpu.py``       measures bandwidth, matrix rates and launch cost of a GPU
"""
