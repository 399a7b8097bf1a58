"""What belongs to the node rather than to a job: folder, identity, environments, interfaces, GPUs, and the proxy to other hosts."""
