"""What became of the time that jobs held nodes for: what counts, what was lost to which fault, and in which phase."""
