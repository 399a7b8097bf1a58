"""Checkpoints on disk: written completely or not at all, published by renaming, found again, and verified while they are read.

The format is that of `torch.distributed.checkpoint` plus a manifest. Snapshots in memory are in `holdfast.runtime.snapshots`; writing a
checkpoint from them, alongside training, is in `holdfast.runtime.checkpoint_writer`.
"""
