"""What Prefect runs: flows that read as sentences made of tasks."""
