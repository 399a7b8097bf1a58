"""In-memory snapshots: their format, who reads them from another node, and requests to write one to disk.

Shared by the agent, which owns the store, and the runtime, which writes into it. Standard library only.
"""
