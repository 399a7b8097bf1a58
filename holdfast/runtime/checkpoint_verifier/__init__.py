"""Whether a checkpoint, or the snapshots of one step, belong together: `python -m holdfast.runtime.checkpoint_verifier FOLDER`.

`findings` and `files` start without torch, so that the command line reads checkpoints with them too.
"""
