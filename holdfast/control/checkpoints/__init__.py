"""How often to save, where replicas lie, what snapshots cost, and the final checkpoint."""
