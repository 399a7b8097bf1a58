"""The training state of a rank: which tensors and plain values it has, and how to take them apart and put them back."""
