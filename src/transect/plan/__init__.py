"""Plans made before anything runs, from the cost model and the figures of a machine. No torch.

A training run:

* ``layouts.py``: every way to spread a run over some devices, ranked by tokens per second, with reasons

A service, simulated: the shipping scheduler, prefix cache, router and scaling policies on a virtual clock:

* ``requests.py``: requests of a trace as engines take them. ``fleet.py``: some engines behind a router
* ``disturbances.py``: failures, rolls and departures in it. ``drills.py``: what each of them costs and adds
* ``target.py``: percentiles to keep. ``choices.py``: cards, layouts and formats, and how such an engine behaves
* ``capacity.py``: the highest rate of an engine. ``serving.py``: engines for a load, reasons, costs
* ``drafting.py``: a model that drafts
* ``profile.py``: a server as it was measured. ``calibrate.py``: fits a profile on one sweep
* ``report.py``: a plan in words and as JSON. ``page.py``: as a page with curves
"""

from __future__ import annotations
