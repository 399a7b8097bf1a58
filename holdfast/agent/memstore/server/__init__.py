"""A node's memory server: gives its vault's snapshots to other nodes, takes replicas of theirs, and sends its own ranks' to their home."""
