"""What belongs to the node rather than to a job: folder, identity, epochs, interfaces, GPUs, and the proxy for other hosts."""
