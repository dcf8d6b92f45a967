"""Capacity planning: the real scheduler on a virtual clock and the cost model. Nothing is here yet."""
