"""Nodes that Slurm allocates: request, follow and release allocations, run agents in job steps, drain nodes.

Here: everything that calls a command of Slurm. Not here: how many nodes a job needs, and when it leaves one (`holdfast.control.nodes`).
"""
