"""What happens to nodes: health, quarantine, burn-in, drains, maintenance, and which ranks and replicas they hold."""
