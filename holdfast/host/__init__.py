"""What a process takes from the machine that it runs on: other processes, ports, limits, GPUs, environment variables."""
