"""Look at nodes: readers of one node, sweeps over many, readiness for Holdfast, burn-in.

`remote` is the one way to run a program on a node. What is found is judged in `detectors` and `policies`.
"""
