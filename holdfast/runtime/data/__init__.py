"""Data loading that resumes at the exact sample, and the share of a batch that each rank computes."""
