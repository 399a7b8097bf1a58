"""Lives with what a test does not care about filled in; times are given in seconds and kept in microseconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from holdfast.accounting.ledger import SECOND, Ledger, LedgerAccount, TimeCategory
from holdfast.accounting.timeline import COLUMNS, GenerationSpan, IncidentSpan, JobTimeline, PhaseTime, SaveSpan, Spares, step_spans


def us(seconds: float) -> int:
    """Return microseconds."""
    return round(seconds * SECOND)


def generation_span(number: int, at: float, devices: int = 2, **facts: Any) -> GenerationSpan:
    """Return a generation of two ranks."""
    if "first_step_at" in facts:
        facts["first_step_at"] = us(facts["first_step_at"])
    return GenerationSpan(number=number, at=us(at), devices=devices, **facts)


def incident_span(number: int, begin: float, end: float, after: int | None = None, **facts: Any) -> IncidentSpan:
    """Return an incident; *phases* are names with seconds."""
    phases = [PhaseTime(name, us(seconds)) for name, seconds in facts.pop("phases", {}).items()]
    known = {"id": f"i{number}", "kind": "worker-sigkill", "outcome": "recovered"}
    return IncidentSpan(
        number=number, fault_at=us(begin), recovered_at=us(end), generation_after=after, phases=phases, **{**known, **facts}
    )


def job_timeline(
    end: float,
    generations: Sequence[GenerationSpan],
    steps: Iterable[tuple[int, int, float, float]] = (),
    *,
    back_to: dict[int, int] | None = None,
    **facts: Any,
) -> JobTimeline:
    """Return a job that began at 0; *steps* are generation, step, when it ended, and seconds."""
    table = np.array(sorted(steps), dtype=COLUMNS)
    facts["saves"] = [SaveSpan(us(at), generation, us(stood)) for at, generation, stood in facts.pop("saves", ())]
    facts["spares"] = [Spares(us(at), devices) for at, devices in facts.pop("spares", ())]
    known: dict[str, Any] = {"begin": 0, "ended": True, "devices": generations[0].devices if generations else 2}
    return JobTimeline(end=us(end), generations=generations, steps=step_spans(table, back_to or {}, until=us(end)), **{**known, **facts})


def seconds(ledger: Ledger) -> dict[Any, float]:
    """Return the seconds of all devices by use; those of losses by phase and incident."""
    found = {}
    for account, amount in ledger.booked.items():
        if amount.devices or amount.wall:
            key = account.category if account.category is not TimeCategory.LOST else (account.phase, account.incident)
            found[key] = amount.devices / SECOND
    return found


def wall(ledger: Ledger, use: TimeCategory) -> float:
    """Return the seconds of the job that *use* took."""
    return ledger.booked[LedgerAccount(use)].wall / SECOND
