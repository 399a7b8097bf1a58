"""The processes of the ranks on this node: how they are started, stopped, reaped, and recovered without a restart."""
