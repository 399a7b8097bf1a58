"""What a job could go back to, on disk and in its nodes' memory: which checkpoints and snapshots there are, and whether each is whole.

Starts without torch; `verifier_process` has the rest judged by `holdfast.runtime.checkpoint_verifier`. What training writes and reads
itself lies in `holdfast.runtime`, the format of snapshots in `holdfast.memstore`.
"""
