"""The node monitor: a process next to the agent that detects faults of the node while a job runs on it.

It reads the kernel's log, the GPU driver's events and link changes as they come, and samples everything else once a minute and after each
of these. It sends only faults, so that the agent's loop, for which ranks wait, does none of this work.
"""
