"""Planned changes of who holds which ranks: migrate them to another node, or grow again, live or by a restart.

No fault causes them; a fault meanwhile is an incident like any other (`holdfast.control.recovery`).
"""
