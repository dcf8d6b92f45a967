"""A fleet that serves many users: ``router``, ``autoscaler``."""
