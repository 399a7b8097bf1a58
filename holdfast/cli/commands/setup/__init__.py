"""Set up: the demo, notifications, metrics, support bundles, shell completion.

None of them is needed to run a job.
"""
