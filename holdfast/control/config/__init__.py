"""Configuration of a running job: the policy file, the cluster file, and the environment of its ranks.

How these files are parsed is in `holdfast.spec`.
"""
