"""Managed process groups: torch calls them, and the connections and processes under them can be replaced while a process lives.

Here are the groups, their store and control tree, membership, the commit vote, recovery and live migration.
Snapshots and checkpoints are in `snapshots` and `checkpoint`, what a rank's state consists of is in `state`.
"""
