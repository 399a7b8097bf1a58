"""A node's memory server: sends snapshots to nodes that request them, accepts replicas, and replicates its own ranks' snapshots."""
