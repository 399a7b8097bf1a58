"""Metrics for Prometheus, read from the history at each scrape: `families` collects them, `serving` answers scrapes.

They keep no state besides the bills of jobs, which are expensive to compute.
"""
