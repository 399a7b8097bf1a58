"""Readers look at a node and return evidence; they judge nothing. Standard library only, and pynvml where there is one.

Everything that a reader opens lies below a root that it is given, so that tests give it trees of their own.
"""
