"""Format numbers, times and foreign text for people; the same everywhere: terminal, report, Prefect UI."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from holdfast.plurals import plural, ranges

if TYPE_CHECKING:
    from holdfast.history.models import Incident

NOTHING: Final = "–"  # noqa: RUF001 (a dash is no hyphen)
"""Stands for an unknown value."""

_MINUTE: Final = 60
_HOUR: Final = 3600
_DAY: Final = 86400
_BYTES: Final = 1000
_KEPT_CONTROLS: Final = "\n\t"
_PHASES: Final = {"meet": "rendezvous", "step": "finish the step", "groups": "build groups", "load": "transfer state"}
"""What a rank does to enter a new generation."""
_SHORTEST: Final = 0.0005
"""Seconds; a shorter part of a recovery is not worth a word."""
_FORMAT_KEPT: Final = "\u200d"
"""The joiner of emoji is the only format character that cannot mislead a reader."""


ACTS: Final = {
    "drop": "nodes removed",
    "add": "nodes added",
    "need": "nodes needed",
    "seats": "ranks replaced",
    "vacate": "ranks left out",
    "rotate": "ranks change nodes",
    "before": "goes on from before step",
    "skip": "batches left out, by step",
}
"""Field of a decision to its label."""


def duration(seconds: float | None) -> str:
    """Return *seconds* in the unit that a person would choose."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 0:
        return f"−{duration(-seconds)}"  # noqa: RUF001 (a minus is no hyphen)
    if seconds < _MINUTE:
        return _short(seconds)
    whole = round(seconds)
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02d} s"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE:02d} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR:02d} h"


def about(seconds: float) -> str:
    """Return an estimate of *seconds*, rounded: ``10 min``, ``2 h 10 min``, ``3 d 4 h``."""
    if not math.isfinite(seconds) or seconds < _MINUTE:
        return f"{max(0, round(seconds))} s" if math.isfinite(seconds) else NOTHING
    minutes = round(seconds / _MINUTE)
    if minutes < _HOUR // _MINUTE:
        return f"{minutes} min"
    if seconds < _DAY:
        hours, rest = divmod(round(minutes / 10) * 10, 60)
        return f"{hours} h {rest} min" if rest else f"{hours} h"
    days, hours = divmod(round(seconds / _HOUR), 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def _short(seconds: float) -> str:
    for limit, factor, unit, digits in ((0.0095, 1000, "ms", 1), (0.9995, 1000, "ms", 0), (9.995, 1, "s", 2)):
        if seconds < limit:
            return f"{seconds * factor:.{digits}f} {unit}" if seconds else "0 s"
    return f"{seconds:.1f} s"


def moment(at: float | None) -> str:
    """Return *at* (seconds since 1970) as date and time in UTC."""
    if at is None or not math.isfinite(at):
        return NOTHING
    return datetime.fromtimestamp(at, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def since(at: float | None, zero: float) -> str:
    """Return how long after *zero* something happened."""
    return NOTHING if at is None else duration(max(0.0, at - zero))


def fault_line(title: str, quote: str, action: str) -> str:
    """Return a fault in one line: what it is, what was observed, and what to do."""
    return f"{title}: {quote.removesuffix('.')}. Cure: {action}"


def count(number: int | None) -> str:
    """Return *number* with grouped digits."""
    return NOTHING if number is None else f"{number:,}"


_MANY: Final = 1000
"""From so many per second on, three digits would need an exponent."""


def per_second(number: float | None) -> str:
    """Return a rate per second with three digits, or all of a large one."""
    if number is None:
        return NOTHING
    return f"{number:#.3g}".rstrip(".") if number < _MANY else f"{number:,.0f}"


def share(part: float | None) -> str:
    """Return *part* (0 to 1) as a percentage."""
    if part is None or not math.isfinite(part):
        return NOTHING
    if 0.9995 <= part < 1:  # noqa: PLR2004 (rounding would show 100%, which it is not)
        return f"{min(part * 100, 99.999):.3f}%"
    return f"{part * 100:.1f}%"


def size(number: int | None) -> str:
    """Return *number* bytes in a decimal unit."""
    if number is None:
        return NOTHING
    amount = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < _BYTES:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.3g} {unit}"
        amount /= _BYTES
    return f"{amount:,.3g} TB" if amount < _BYTES else f"{amount:,.0f} TB"


def listing(names: Iterable[str], most: int = 16) -> str:
    """List names, of many only the first: ``gpu-1, gpu-2 and 4,094 more``."""
    named = list(names)
    return ", ".join(named[:most]) + (f" and {count(len(named) - most)} more" if len(named) > most else "")


def ranks(numbers: Iterable[int]) -> str:
    """Return a set of ranks as ranges."""
    return ranges(numbers) or NOTHING


def act(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a decision that have a value, by their labels; replaced ranks as text."""
    shown = {name: value for name, value in fields.items() if value}
    if "seats" in shown:
        shown["seats"] = [seat(one) for one in shown["seats"]]
    if "noted" in shown:
        shown["noted"] = list(shown["noted"].values())
    return {ACTS.get(name, name): value for name, value in shown.items()}


def seat(fields: Mapping[str, Any]) -> str:
    """Return in which process a replaced rank runs."""
    number, node = fields.get("hot_spare"), fields.get("node")
    return f"rank {fields.get('rank')} in " + (f"hot spare {number} on {node}" if number is not None else f"a new process on {node}")


def rank_count(size: int, facts: Mapping[str, Any] | None) -> str:
    """Return how many ranks a generation of *size* has, and of how many if it runs at reduced size."""
    full = (facts or {}).get("width") or size
    return plural(size, "rank") if full <= size else f"{size:,} of {plural(full, 'rank')}"


def kept_ranks(facts: Mapping[str, Any] | None) -> str:
    """Return how many ranks of a generation kept their process; empty if none did."""
    kept = (facts or {}).get("kept") or []
    return f", {count(len(kept))} of them in the same process as before" if kept else ""


def on_target(target: str) -> str:
    """Return where a fault is: ``node node-0`` is ``node-0`` in a sentence, ``rank 1 on node-0`` stays."""
    return target.removeprefix("node ")


def decided(number: int | str, action: str, reason: str) -> str:
    """Return a decision about an incident in one line."""
    return f"incident {number}: {action}; reason: {reason}"


def incident_opened(incident: Incident) -> str:
    """Return one line about an incident that has opened: what happened, where, and how soon it was detected."""
    soon = duration(max(0.0, incident.detected_at - incident.fault_at))
    return f"incident {incident.number}: {incident.kind} on {on_target(incident.target)}, detected after {soon}"


def incident_closed(incident: Incident) -> str:
    """Return one line about an incident that has closed: how it ended, what was done, and what it cost."""
    end = "closed: the job failed" if incident.outcome == "failed" else incident.outcome or "closed"
    words = [f"incident {incident.number} {end}"]
    if incident.outcome == "recovered":
        words += [f"by {incident.action}"] if incident.action else []
        words += [f"in {duration(incident.downtime_s)}"] if incident.downtime_s is not None else []
    again = "no step" if incident.steps_lost == 0 else plural(incident.steps_lost or 0, "step")
    more = [f"{again} computed again"] if incident.steps_lost is not None else []
    more += [f"now generation {incident.generation_after}"] if incident.generation_after is not None else []
    return ", ".join([" ".join(words), *more])


def recovery_details(facts: Mapping[str, Any] | None) -> list[str]:
    """Return sentences about what a recovery did in the workers; none if that is unknown."""
    if not facts:
        return []
    context = [f"the newest in-memory snapshot was {plural(facts['snapshot_age'], 'step')} old"] if "snapshot_age" in facts else []
    for node, one in (facts.get("counter_increases") or {}).items():
        counters = ", ".join(f"{name} +{growth}" for name, growth in one["counters"].items())
        context.append(f"error counters that increased on {node} within {duration(one['seconds'])}: {counters}")
    if "rebuilt" not in facts:  # all processes were restarted
        return [*([f"all ranks resumed from {_source(facts)}"] if "source" in facts else []), *context]
    sentences = [f"{plural(facts.get('rebuilt') or 0, 'process group')} rebuilt, {facts.get('kept') or 0} kept"]
    if facts.get("bytes"):
        speed = f" at {size(round(facts['bandwidth']))}/s" if facts.get("bandwidth") else ""
        interfaces = facts.get("interfaces") if facts.get("source") != "memory" else None
        over = f", over {', '.join(interfaces)}" if interfaces else ""
        sentences.append(f"{size(facts['bytes'])} of state transferred from {_source(facts)}{speed}{over}")
    elif facts.get("source") == "checkpoint":
        sentences.append("no surviving rank had the state: all resumed from a checkpoint")
    sentences += context
    phases = {name: seconds for name, seconds in (facts.get("seconds") or {}).items() if seconds >= _SHORTEST}
    if phases:
        times = ", ".join(f"{duration(seconds)} to {_PHASES.get(name, name)}" for name, seconds in phases.items())
        sentences.append(f"the slowest rank took {times}")
    for rank, one in (facts.get("coverage") or {}).items():
        sentences.append(f"rank {rank}: the warm-up had covered {one.get('foreseen')} of {one.get('calls')} calls of the first step")
    return sentences


def source(facts: Mapping[str, Any] | None) -> str:
    """Return where the state came from that a recovery resumed with; empty if unknown."""
    return _source(facts) if facts and facts.get("source") else ""


def _source(facts: Mapping[str, Any]) -> str:
    match facts.get("source"):
        case "memory":
            replicas = facts.get("replicas")
            return "in-memory snapshots" + (f" (replicas for {plural(replicas, 'rank')})" if replicas else "")
        case "checkpoint":
            return "a checkpoint"
    return "surviving ranks"


def complete_already(job: str, step: int, checkpoints: str) -> str:
    """Return what to do with a job that was complete when it started, at *step*, by the newest of its *checkpoints*."""
    return (
        f"job '{job}' is complete at step {count(step)}. To train further, raise the number of steps of its script (in `args`, or where "
        f"the script sets it); to start afresh, change `name` in the job file, or remove the checkpoints in {checkpoints}"
    )


def visible(text: str) -> str:
    """Return *text* with every invisible or reordering character made visible."""
    return "".join(char if _harmless(char) else _picture(char) for char in text.replace("\r\n", "\n"))


def _harmless(char: str) -> bool:
    kind = unicodedata.category(char)
    return char in _KEPT_CONTROLS or char == _FORMAT_KEPT or kind not in {"Cc", "Cf", "Cs", "Co", "Cn"}


def _picture(char: str) -> str:
    """Return the Unicode picture of an ASCII control character, the code point of anything else."""
    code = ord(char)
    if code < 32:  # noqa: PLR2004 (the first 32 code points have pictures from U+2400 on)
        return chr(0x2400 + code)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"  # noqa: PLR2004 (the end of the basic plane)


def clipped(text: str, limit: int) -> str:
    """Return *text*, or its two ends and how much is left out between them."""
    if len(text) <= limit:
        return text
    head, tail = limit // 4, limit - limit // 4
    return f"{text[:head]}\n… {count(len(text) - limit)} characters left out …\n{text[-tail:]}"
