"""Simulate training jobs under faults: the policies of `holdfast.policies` on a virtual clock, with faults and phase times from sources.

A scenario says what is simulated, fault sources make the faults, systems answer them, and results add up what the time was used for.
"""
