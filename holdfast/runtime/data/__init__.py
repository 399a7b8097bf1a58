"""Data loading that resumes at the exact sample, and the division of a step's batch among the ranks."""
