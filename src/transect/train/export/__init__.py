"""Runs for other programs: ``write.py``: adapters and merged models; ``quantize.py``: models in fewer bits."""
