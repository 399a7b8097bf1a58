"""Faults of the training itself: processes, progress, performance, losses and checkpoints, from what workers report."""
