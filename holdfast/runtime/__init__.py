"""Inside the training process: steps, checkpoints, and the line to the agent. Torch and the standard library only."""
