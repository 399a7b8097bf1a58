"""The node's lookout: a process beside the agent that finds faults of the node while a job runs on it.

What the kernel logs, what the GPUs' driver tells and what becomes of links is heard as it happens; all else is looked at once a minute, and
when something happened. It judges by itself and says only what is a fault, so that the agent's loop, on which ranks wait, does none of it.
"""
