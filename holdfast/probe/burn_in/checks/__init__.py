"""What is tried on a node. Standard library only, and torch where the node's python3 has it: these modules travel to nodes as text.

Each check answers with a `detectors.burn_in_results.Check`. What was measured is held against limits by who asked.
"""
