"""Checkpoints: what a job can resume from, whether it is intact, which checkpoints to delete, and how often to save.

Reading and verification are in `holdfast.checkpoints`.
"""
