"""The agent's side of in-memory snapshots: the store's lifetime, replication to other nodes, the checkpoint writer.

The format is `holdfast.memstore`.
"""
