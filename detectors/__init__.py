"""Fault catalogue, detectors that turn evidence into faults, and the diagnosis. Pure: no clock, no I/O."""
