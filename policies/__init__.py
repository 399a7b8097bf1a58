"""What to do about faults: states and their moves, levels, the recovery ladder, budgets. Pure: no clock, no I/O."""
