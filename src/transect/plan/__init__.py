"""Plans made before anything runs, from the cost model and the figures of a machine. No torch.

* ``machine.py``: ``Machine``, what the devices and the links between them can do, and which shares of it programs reach
* ``step.py``: how long a step of training takes, in parts: compute, exposed communication, bubbles, optimizer, host
* ``collectives.py``: how long ranks take to exchange something, and how much of it nothing hides
* ``layouts.py``: every way to spread a run over some devices, ranked by tokens per second, with reasons
"""

from __future__ import annotations
