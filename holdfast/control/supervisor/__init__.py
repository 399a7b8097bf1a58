"""The controller of one job, from the lease to its release: its loop, the handlers of the agents' events, launch, reattach and detach.

What the controller drives lives beside this package: `state` (generations, incidents, transitions), `faults`, `nodes`, `checkpoints`,
`recovery`, `migration`. Nothing here decides: policies do.
"""
