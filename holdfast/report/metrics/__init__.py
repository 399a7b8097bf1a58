"""Metrics for Prometheus, read from the history alone: `families` collects, `exposition` writes, `serving` answers scrapes."""
