"""Costs: work -> FLOPs and bytes -> seconds, for any device, in plain Python without torch.

* ``units.py``     sizes of memory, read and written as people do
* ``ceilings.py``  ``Ceilings``: bytes per second, FLOP/s for each dtype, cost of a launch, the link to the host
* ``presets.py``   data sheets of devices, one file each in ``devices/``: for planning without them
* ``work.py``      ``Cost``: FLOPs and bytes of a piece of work; keys that attention sees, experts that tokens touch
* ``steps.py``     ``StepLoad``: the work of a serving step
* ``learning.py``  step times learned while an engine runs; ``fitting.py``: step times fitted on measured steps
* ``machine.py``   ``Machine``: devices and their links, and the shares of both that training reaches
* ``links.py``     seconds of collectives between ranks, exposed and hidden
"""
