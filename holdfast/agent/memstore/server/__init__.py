"""A node's memory server: sends its snapshots to nodes that ask, takes replicas of theirs, and replicates its own ranks' snapshots."""
