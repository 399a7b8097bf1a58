"""The live side of a flow: the controller of one job, its connections to agents, the state of the job, and recoveries.

Decisions are in `policies`, fault detection is in `detectors`, the Prefect tasks that call this package are in `tasks`.
"""
