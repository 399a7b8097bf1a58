"""Talk to the Prefect server: artifacts, events, automations, flow-run states and approvals.

The one package that imports Prefect besides `flows`, `tasks` and `holdfast.workflows`, which use it. What needs no Prefect client (event
names, links, a temporary server) is in `holdfast.prefect`.
"""
