"""The controller of one job, from the lease to its release: its loop, the handlers of the agents' events, launch, reattach and detach.

What the controller drives is in the other packages of `control`: `state` (generations, incidents, transitions), `faults`, `nodes`,
`checkpoints`, `recovery`, `migration`. Nothing here decides: policies do.
"""
