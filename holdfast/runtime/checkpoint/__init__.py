"""Checkpoints on disk: saved whole or not at all, published, found again, verified while they are read."""
