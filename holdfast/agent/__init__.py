"""One process per node: starts workers, watches them and the node, keeps a journal, streams events. Standard library only."""
