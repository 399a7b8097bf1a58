"""Write checkpoints to disk out of the snapshots in a node's memory, in a process of its own, while training goes on.

The result is what `holdfast.runtime.checkpoint.save` writes: a folder in the format of `torch.distributed.checkpoint`, with a manifest,
whole or absent. Writers on different nodes rendezvous through that folder (`rendezvous`) and need no other connection.
"""
