"""Replicas of the server on Ray: routing, autoscaling, failure. Nothing is here yet."""
