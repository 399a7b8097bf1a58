"""Simulated nodes: one process plays thousands of agents over the real protocol, without workers. For benchmarks and tests of scale."""
