"""The state of one job: its generations and ranks, incidents, state machine and log, and a live migration in progress.

Nothing here does I/O apart from the log; what changes the state is in `supervisor`, `recovery` and `migration`.
"""
