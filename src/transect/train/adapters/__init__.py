"""Low-rank adapters on a model: ``lora.py``, and ``qlora.py``: a 4-bit base under them."""
