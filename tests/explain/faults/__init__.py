"""Small programs with one fault each.

``KIND`` is the finding that must come first; ``fixed`` is the same work without the fault.
"""
