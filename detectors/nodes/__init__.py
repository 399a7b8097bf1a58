"""Faults of nodes and their parts, from readings of them, probes and burn-in checks."""
