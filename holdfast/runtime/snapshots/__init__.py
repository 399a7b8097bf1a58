"""In-memory snapshots of a rank's state: when and what to copy, the thread that copies, the cost of it, and restoring from snapshots.

Their file format is in `holdfast.memstore`; checkpoints on disk are in `holdfast.runtime.checkpoint`.
"""
