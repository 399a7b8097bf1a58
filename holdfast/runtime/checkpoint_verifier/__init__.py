"""Prove that a checkpoint, or the snapshots of one moment, belong to one step: `python -m holdfast.runtime.checkpoint_verifier FOLDER`."""
