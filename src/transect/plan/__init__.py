"""Plans made before anything runs, from the cost model and the figures of a machine. No torch.

* ``layouts.py``: every way to spread a run over some devices, ranked by tokens per second, with reasons
"""

from __future__ import annotations
