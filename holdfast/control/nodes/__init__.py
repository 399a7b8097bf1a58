"""Which nodes a job may use: cordons, approvals, drains, spare nodes, hot spares, allocations, preflight."""
