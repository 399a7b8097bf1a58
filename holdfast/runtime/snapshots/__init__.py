"""Snapshots of the training state in the node's memory, taken while training waits."""
