"""What the garbage collector of a flow looks at, and when.

A look at all that a job on thousands of nodes has holds the flow up for a fifth of a second, and comes when much is made: in the middle of
a recovery. So what stays is set aside in time, where collections do not look; what dies of it in cycles is found when nothing happens.
"""

from __future__ import annotations

import gc
from typing import Final

THRESHOLDS: Final = (20_000, 20, 100)
"""Objects made, less those that died, until the young are looked at; looks at these until one at the middle-aged, and so on. By default it
is 700, 10 and 10: a wave of what thousands of nodes say is looked through again and again while it is answered."""


def begin() -> None:
    """Look less often from now on, and not at what is there, such as Prefect and SQLAlchemy with their many objects."""
    gc.set_threshold(*THRESHOLDS)
    gc.freeze()


def collect_and_freeze() -> None:
    """Collect what came since the last time, and have no later collection look at what stays of it."""
    gc.collect()
    gc.freeze()


def collect_everything() -> None:
    """Collect what died since it was set aside, such as what belonged to former generations, and set the rest aside again."""
    gc.unfreeze()
    collect_and_freeze()
