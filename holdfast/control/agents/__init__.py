"""Connections to the agents of all nodes: commands out, events in, reconnecting, and whether this controller is cut off.

What the events mean is in `state` and `supervisor`; how a node is reached is in `holdfast.cluster`.
"""
