"""Probe nodes: readers of one node, sweeps over many, health, readiness for jobs, and burn-in.

Here: how evidence about a node is collected, and the checkups that flows and commands run. Not here: what the evidence means
(`detectors`), and which state a node gets (`policies`). `remote` is the one way to run a program on a node.
"""
