"""Nodes that Slurm hands out: allocations asked for and followed, agents in steps of their own, nodes drained and given back."""
