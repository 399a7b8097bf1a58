"""What Prometheus is told, read from the history alone: `families` collects, `exposition` writes, `serving` answers scrapes."""
