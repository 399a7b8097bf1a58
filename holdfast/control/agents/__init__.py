"""Connections to the agents of all nodes: commands out, events in, reconnects, partitions."""
