"""What to do about faults: job and node states, recovery rules, node health, quarantine, burn-in, checkpoint interval.

Pure functions and values on the standard library: no clock, no I/O. What faults are is in `detectors`, who carries decisions out in
`holdfast.control`.
"""
