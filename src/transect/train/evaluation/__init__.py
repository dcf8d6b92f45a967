"""Measures of a model, through the engine: ``perplexity.py`` of a text, ``harness.py`` for tasks."""
