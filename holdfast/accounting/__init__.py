"""Cost accounting: what the time that jobs held nodes for was used for, what failures cost, and what another policy would have cost.

Everything is computed from the history, in exact microseconds. How it is shown belongs to `holdfast.report`.
"""
