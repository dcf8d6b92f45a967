"""Urgent requests first: the lower a request's priority, the sooner its turn."""

from .registry import OrderPolicy

POLICY = OrderPolicy(level=lambda priority, outputs: priority, priorities=True)
