"""Interview questions with numbers that are checked: ``interview_dot``, ``interview_backward``,
``interview_serving``."""
