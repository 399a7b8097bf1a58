"""Run: start a job, check its files, stop it, and detach its controller.

How a job is watched while it runs is in `holdfast.cli.watch`, as `status --follow` does the same.
"""
