"""Timelines, idle gaps, findings: why a run took as long as it did. Nothing is here yet."""
