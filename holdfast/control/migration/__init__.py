"""Planned changes of who holds which ranks: move them elsewhere, or grow again, live or by a restart.

Nothing is wrong when one begins; what goes wrong meanwhile is an incident like any other (`holdfast.control.recovery`).
"""
