"""Checkpoints of one job: their interval, replicas of in-memory snapshots and their cost, and the final checkpoint.

Writing and reading them is in `holdfast.runtime`; the advice on the interval is in `policies`.
"""
