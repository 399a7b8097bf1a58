"""What went wrong: the fault catalogue, detectors from evidence to faults, and the diagnosis. Pure: no clock, no I/O."""
