"""Training and fine-tuning: the model of ``models/`` and the operators of ``ops/``, in a loop that survives crashes.

* ``config/``: a run as frozen dataclasses, from TOML.
* ``data/``: files to documents, and documents to micro-batches.
* ``model/``: the model of a run, and how its layers compute and keep activations.
* ``adapters/``: low-rank adapters, and a 4-bit base under them.
* ``objectives/``: the losses: next tokens, preferences, rewards, a teacher's distribution.
* ``optim/``: AdamW, 8-bit AdamW, Muon, and optimizers for slow links.
* ``loop/``: the training loop, its checkpoints and its reports. Start reading in ``loop/trainer.py``.
* ``evaluation/``: measures of a model's quality, taken through the engine.
* ``export/``: adapters and models for other programs.
"""
