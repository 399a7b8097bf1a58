"""What a job can resume from, on disk and in the memory of its nodes: which checkpoints and snapshots exist, and whether they are complete.

Starts without torch; `verify` runs `holdfast.runtime.checkpoint_verifier` in a process of its own for what needs torch. What training
itself writes and reads is in `holdfast.runtime`, the format of snapshots in `holdfast.memstore`.
"""
