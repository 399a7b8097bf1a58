"""When the garbage collector of a controller runs, and on what.

A full collection over the objects of a job on thousands of nodes takes a fifth of a second, and comes when many objects are made: in the
middle of a recovery. So long-lived objects are frozen in time, and garbage among them is collected when nothing happens.
"""

from __future__ import annotations

import gc
from typing import Final

THRESHOLDS: Final = (20_000, 20, 100)
"""Net new objects until a collection of the youngest generation; collections of it until one of the next, and so on. With Python's 700, 10
and 10 a burst of messages of thousands of nodes is walked through again and again while it is handled."""


def begin() -> None:
    """Collect less often from now on, and exclude the present objects, such as those of Prefect and SQLAlchemy."""
    gc.set_threshold(*THRESHOLDS)
    gc.freeze()


def collect_and_freeze() -> None:
    """Collect what was made since the last call, and exclude the rest from later collections."""
    gc.collect()
    gc.freeze()


def collect_everything() -> None:
    """Collect frozen objects that have died since, such as those of earlier generations, and freeze the rest again."""
    gc.unfreeze()
    collect_and_freeze()
