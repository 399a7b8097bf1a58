"""What is known of the running generation: its ranks, their steps and places, a migration in work."""
