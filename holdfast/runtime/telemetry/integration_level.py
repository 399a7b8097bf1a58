"""Which level of integration a script has reached, and why: said once, in the log of rank 0, and to the controller.

``holdfast status`` shows it. From it a user knows what a fault will cost before there is one.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any, Final

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.runtime.agent_client import link
from holdfast.runtime.groups.membership import installed
from holdfast.torch_versions import untested

MANAGED: Final = "process groups and state are managed: a lost rank is replaced, and the other ranks keep their processes"
RESTART_STATE: Final = "after a fault all ranks restart from the newest step in memory or on disk"
RESTART: Final = (
    "this script has no holdfast.session, so after a fault all ranks restart from the checkpoint that it loads itself, or from the start"
)
RESTART_LIGHTNING: Final = (
    "this Trainer has no HoldfastCallback, so after a fault all ranks restart from the file of fit(ckpt_path=...), or from the start "
    "without one; Lightning restores no random generators, nor a DataLoader's position in an epoch: "
    "Trainer(callbacks=[HoldfastCallback()]) does"
)
"""For Lightning, whose `fit` resumes only what it is given, and not bit-identically: seen with 2.6, tests/integration/test_lightning.py."""
LIGHTNING_TRAINERS: Final = frozenset({"lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer"})
"""Modules of Lightning's Trainer, under either name by which it is installed."""
NO_SESSION: Final = "the script has no holdfast.session"
STOCK: Final = "the job says `groups: stock`"

_stock_because: list[str] = []
"""Why the groups are torch's own, once that has been decided."""
_said: list[str] = []


def groups_are_stock(why: str) -> None:
    """Note that the process groups are torch's own, because *why*; a script that will have no session gets that message now."""
    _stock_because[:] = [why]
    if why == NO_SESSION:
        _say("unchanged", f"{_restart()}; process groups are PyTorch's own")
    else:
        _await_session()


def groups_are_managed() -> None:
    """Note that the process groups are managed: whether the state is too is known when a session begins, or the first step without one."""
    _await_session()


def session_begins(*, grouped: bool) -> None:
    """Say what the script has reached, now that its state is managed; *grouped*: it has several ranks.

    Of a single rank there is nothing to say that a user would not expect, unless its torch is untested.
    """
    if not grouped:
        if untested(torch.__version__):
            _say("managed-state", f"state is managed: {RESTART_STATE}")
        return
    manager = installed()
    if manager is None:
        demanded = os.environ.get("HOLDFAST_GROUPS") == "stock"  # then nothing is replaced that could have noted it
        why = _stock_because[0] if _stock_because else STOCK if demanded else "the script created them itself"
        if why == NO_SESSION:
            why = "no module of the script's own uses holdfast.session (`groups: managed` manages them)"
        _say("managed-state", f"state is managed, process groups are PyTorch's own because {why}: {RESTART_STATE}")
    elif manager.declined:
        _say("managed-state", f"state is managed, process groups are not repaired because {manager.declined}: {RESTART_STATE}")
    else:
        _say("managed-groups", MANAGED)


def _await_session() -> None:
    """Wait for the first step of an optimizer: a script that has no session by then has none."""
    stepped = False

    def first_step(_optimizer: Optimizer, _given: Any, _named: Any) -> None:  # noqa: ANN401 (torch's signature)
        nonlocal stepped
        if stepped:  # a hook cannot remove itself: torch is going through all hooks, and raises when one is gone
            return
        stepped = True
        manager = installed()
        if link().has_session or not link().attached:
            return
        if manager is not None and not manager.declined and manager.replaces_init:
            manager.decline(NO_SESSION)
        groups = "managed" if manager is not None else f"PyTorch's own because {(_stock_because or ['?'])[0]}"
        _say("unchanged", f"{_restart()}; process groups are {groups}")

    register_optimizer_step_pre_hook(first_step)


def _restart() -> str:
    """Return what a fault will cost without a session, by who trains: Lightning's Trainer is among the callers, or not."""
    frame = sys._getframe()  # noqa: SLF001 (that Lightning is imported does not say that its Trainer trains: Fabric imports it too)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") in LIGHTNING_TRAINERS:
            return RESTART_LIGHTNING
    return RESTART


def _say(level: str, text: str) -> None:
    """Say it on rank 0 of a job of Holdfast, unless that is what was said last; and that this version of torch is untested, if so."""
    text = "; ".join(filter(None, (text, untested(torch.__version__))))
    if not link().attached or os.environ.get("RANK") != "0" or os.environ.get("HOLDFAST_HOT_SPARE") or _said[-1:] == [text]:
        return
    _said.append(text)
    with suppress(OSError, ValueError):  # an output that is closed
        # as the agent marks its own lines in this log: `holdfast run` shows the event instead
        print(f"--- holdfast: {text}", file=sys.stderr, flush=True)  # noqa: T201 (the rank's own output, whatever logging the script sets up)
    link().report("level", level=level, text=text)
