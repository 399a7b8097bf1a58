"""Which nodes a job may use: cordons, approvals, drains, spare nodes, hot spares, allocations, preflight checks.

Nodes are reached through `holdfast.cluster`; the rules for cordons and drains are in `policies`.
"""
