"""Burn-in: test nodes with real work before they return to service.

Here: `checks` run on the node, by python3 alone; `session` and `runner` drive them, `repair` applies the results to quarantined nodes. Not
here: the thresholds, and what a result means for a node (`holdfast.policies.nodes.burn_in`, `holdfast.policies.nodes.quarantine`).
"""
