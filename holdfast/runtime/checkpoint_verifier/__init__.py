"""Verify that a checkpoint, or the snapshots of one step, belong together: `python -m holdfast.runtime.checkpoint_verifier FOLDER`.

`findings` starts without torch, so that the command line can check the files of checkpoints too.
"""
