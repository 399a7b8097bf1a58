"""From events to faults and the policy's case: evaluation, confirmation, diagnosis, stragglers, connections between nodes.

What counts as a fault is in `detectors`, what to do about it is in `policies`.
"""
