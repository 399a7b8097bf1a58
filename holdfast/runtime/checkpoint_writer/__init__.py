"""Write checkpoints to disk from the snapshots in a node's memory, in a process of its own, alongside training.

The result is what `holdfast.runtime.checkpoint.save` writes: a folder in the format of `torch.distributed.checkpoint` with a manifest,
complete or absent. Writers on different nodes coordinate through files in that folder (`rendezvous`) and need no other connection.
"""
