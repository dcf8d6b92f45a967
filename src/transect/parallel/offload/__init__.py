"""Keep data of a run or an engine outside the device's memory.

Memory and files are those of ``transect.hardware``; streamed layers of a served model are in
``transect.models.streaming``. For training:

* ``groups.py``: the numbers of many parameters, cut into groups that are moved together
* ``states.py``: an optimizer's states, in host memory or on a disk
* ``pieces.py``: the weights of layers that do not run, there
* ``drain.py``: gradients on their way to host memory; ``upload.py``: new weights on their way back
"""
