"""The Prefect flows: training-job (the state machine of one job), its run form, cluster-health and node-repair.

Flows call tasks; they contain no I/O, no `try` and no `sleep`. Tasks are in `tasks`, what tasks do is in `holdfast`.
"""
