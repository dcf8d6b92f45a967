"""Costs: work -> FLOPs and bytes -> seconds, for any device, in plain Python without torch.

Devices and links:

* ``ceilings.py``  ``Ceilings``: bytes per second, FLOP/s for each dtype, cost of a launch, the link to the host
* ``presets.py``   data sheets of devices, one file each in ``devices/``: for planning without them
* ``machine.py``   ``Machine``: devices and their links, and the shares of both that training reaches
* ``links.py``     seconds of collectives between ranks, exposed and hidden

Work:

* ``work.py``      ``Cost``: FLOPs and bytes of a piece of work, of products; keys that attention sees, experts touched
* ``storage.py``   ``Storage``: bits of a number of each part of a model
* ``model.py``     the cost of a step of a model, by operator; bytes of its weights and of its KV cache

Seconds:

* ``floors.py``    ``Floor``: the least time of a step on a device; MBU and MFU
* ``steps.py``     ``StepLoad``: the work of a serving step, in the numbers that its time depends on
* ``serving.py``   ``ServingSteps``: seconds of a serving step from model, layout, machine and load, before it runs
* ``learning.py``  step times learned while an engine runs; ``fitting.py``: step times fitted on measured steps
* ``warmth.py``    slowdown of a device by its own recent work
* ``training.py``  ``TrainingStep``: seconds of a training step by part, on each rank of a layout

Memory: ``memory/``, accounts of training and serving before anything is loaded

* ``units.py``     sizes of memory and times as text
"""
