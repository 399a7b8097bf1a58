"""In-memory snapshots: their file format, where they are stored, how another node reads them, and requests to write one to disk.

The agent owns a memory store and the runtime writes into it; both use these modules. Standard library only.
What takes and restores snapshots is in `holdfast.runtime.snapshots`; the server that replicates them is in `holdfast.agent.memstore`.
"""
