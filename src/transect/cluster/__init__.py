"""Replicas of the server on Ray: routing, autoscaling, failure. Nothing is here yet; the level keeps its place in the order."""
