"""Write checkpoints to disk out of the snapshots in a node's memory, in a process of its own, while training goes on.

The result is what `holdfast.runtime.checkpoint` writes: a folder in the format of `torch.distributed.checkpoint`, with a manifest, there as
a whole or not at all. Flushers of different nodes meet in that folder (`meeting`), and need no other way to talk.
"""
