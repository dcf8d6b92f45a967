"""Stands in for ``_paths.py`` of a folder of benchmarks: pytest's ``pythonpath`` has set the paths already."""
