"""Look at nodes: readers of one node, sweeps over many, readiness for Holdfast, burn-in.

What is found is judged in `detectors` and `policies`.
"""
