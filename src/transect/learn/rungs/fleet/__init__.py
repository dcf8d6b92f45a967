"""The fleet: ``router``, ``autoscaler``. ``planned`` plays a chat trace through the planner's simulator with either."""
