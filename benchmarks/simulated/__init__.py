"""Simulated nodes: agents of which one process plays thousands, over the real protocol, without workers. For benchmarks and tests of scale."""
