"""Nodes: list and check them, take them out of service and return them, prepare hosts for jobs.

The rules about cordons and quarantines are in `policies`, the checks in `holdfast.probe`.
"""
