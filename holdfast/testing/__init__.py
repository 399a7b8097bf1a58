"""Break running jobs on purpose, and find what they left behind.

For the demo, benchmarks and tests. Nothing that runs a job imports it.
"""
