"""Metrics for Prometheus, read from the history alone: `families` collects them for `prometheus_client`, `serving` answers scrapes."""
