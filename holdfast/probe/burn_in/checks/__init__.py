"""The checks of a burn-in. Standard library only, and torch where the node's python3 has it: these modules are sent to nodes as text.

Each check returns a `holdfast.detectors.nodes.burn_in_results.Check`. Not here: the thresholds, which the caller applies.
"""
