"""Lightning's Trainer with its state saved by a session: after a fault, training resumes bit-identically in the middle of an epoch.

`callback` is what the user creates, `fit` runs one ``Trainer.fit`` under a session, `state` is what a rank needs besides the session's
objects, and `data` counts the batches of the training data.
"""

from holdfast.integrations.lightning.callback import HoldfastCallback

__all__ = ["HoldfastCallback"]
