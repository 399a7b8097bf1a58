"""Trying a node out with real work. `checks` run on the node, by python3 alone; the rest asks them, from wherever Holdfast is."""
