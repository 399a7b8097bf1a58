"""One process per node: it starts the job's workers, watches them and the node, and tells the flow. Standard library only."""
