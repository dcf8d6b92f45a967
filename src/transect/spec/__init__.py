"""Descriptions of models without torch: families, configurations, shapes, names of weights.

* ``model.py``: ``ModelConfig``, ``RopeConfig``; ``moe.py``: ``MoEConfig``
* ``weights.py``: canonical names and shapes of all weights; ``shapes.py``: built-in shapes
* ``families/``: families of models, one file an entry; ``hf.py`` reads and writes their ``config.json``, ``gguf.py``
  their GGUF metadata; ``gguf_places.py``: tensors of GGUF files
* ``eagle.py``: ``HeadConfig``, heads that draft
* ``settings.py``: settings of engine, server and training: options, checks and pages from dataclasses
* ``fields.py``: values of files, checked as they are read, with errors that name the field; ``records.py`` finds the
  records of folders with one file an entry
* ``layouts/``: layouts of a model over ranks; ``numbers/``: number formats, one file an entry
"""
