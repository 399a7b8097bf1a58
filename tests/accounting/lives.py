"""Lives with what a test does not care about filled in; times are given in seconds and kept in microseconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from holdfast.accounting.ledger import SECOND, Ledger, LedgerAccount, Use
from holdfast.accounting.steps import COLUMNS, pieces
from holdfast.accounting.timeline import GenerationSpan, IncidentSpan, JobTimeline, PhaseTime, SaveSpan, Spares


def us(seconds: float) -> int:
    """Return microseconds."""
    return round(seconds * SECOND)


def an_era(number: int, at: float, devices: int = 2, **facts: Any) -> GenerationSpan:
    """Return a generation of two ranks."""
    if "first_step_at" in facts:
        facts["first_step_at"] = us(facts["first_step_at"])
    return GenerationSpan(number=number, at=us(at), devices=devices, **facts)


def a_trouble(number: int, begin: float, end: float, after: int | None = None, **facts: Any) -> IncidentSpan:
    """Return an incident; *phases* are names with seconds."""
    phases = [PhaseTime(name, us(seconds)) for name, seconds in facts.pop("phases", {}).items()]
    known = {"id": f"i{number}", "kind": "worker-sigkill", "outcome": "recovered"}
    return IncidentSpan(number=number, fault_at=us(begin), back_at=us(end), generation_after=after, phases=phases, **{**known, **facts})


def a_life(
    end: float,
    eras: Sequence[GenerationSpan],
    steps: Iterable[tuple[int, int, float, float]] = (),
    *,
    back_to: dict[int, int] | None = None,
    **facts: Any,
) -> JobTimeline:
    """Return a job that began at 0; *steps* are generation, step, when it ended, and seconds."""
    table = np.array(sorted(steps), dtype=COLUMNS)
    facts["saves"] = [SaveSpan(us(at), generation, us(stood)) for at, generation, stood in facts.pop("saves", ())]
    facts["spares"] = [Spares(us(at), devices) for at, devices in facts.pop("spares", ())]
    known: dict[str, Any] = {"begin": 0, "ended": True, "devices": eras[0].devices if eras else 2}
    return JobTimeline(end=us(end), eras=eras, steps=pieces(table, back_to or {}, until=us(end)), **{**known, **facts})


def seconds(ledger: Ledger) -> dict[Any, float]:
    """Return the seconds of all devices by use; those of losses by phase and incident."""
    found = {}
    for account, amount in ledger.booked.items():
        if amount.devices or amount.wall:
            key = account.use if account.use is not Use.LOST else (account.phase, account.incident)
            found[key] = amount.devices / SECOND
    return found


def wall(ledger: Ledger, use: Use) -> float:
    """Return the seconds of the job that *use* took."""
    return ledger.booked[LedgerAccount(use)].wall / SECOND
