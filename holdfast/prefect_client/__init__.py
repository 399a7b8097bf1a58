"""Talk to the Prefect server: artifacts, events, automations, flow-run states, approvals; what flows and tasks share.

Imported by flows and tasks alone: everything else works without Prefect.
"""
