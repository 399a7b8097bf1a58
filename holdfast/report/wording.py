"""How a number, a time or a stranger's text is put into words. The same words in the report and in the Prefect UI."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from holdfast.history.models import Incident

NOTHING: Final = "–"  # noqa: RUF001 (a dash is no hyphen)
"""Stands where a value is not known."""

_MINUTE: Final = 60
_HOUR: Final = 3600
_DAY: Final = 86400
_BYTES: Final = 1000
_KEPT_CONTROLS: Final = "\n\t"
_PHASES: Final = {"meet": "meet", "step": "finish the step", "groups": "build groups", "load": "move state"}
"""What a rank does on its way into a new generation."""
_FORMAT_KEPT: Final = "\u200d"
"""The joiner that holds emoji together is the one format character that cannot mislead a reader."""


def duration(seconds: float | None) -> str:
    """Say how long *seconds* are, in the unit that a person would choose."""
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
    """Say how long *seconds* are as one says what is only estimated: ``10 min``, ``2 h 10 min``, ``3 d 4 h``."""
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
    """Say how long after *zero* something happened."""
    return NOTHING if at is None else duration(max(0.0, at - zero))


def told(title: str, quote: str, cure: str) -> str:
    """Return a fault in one line: what it is, what was seen, and what to do."""
    return f"{title}: {quote.removesuffix('.')}. Cure: {cure}"


def count(number: int | None) -> str:
    """Group the digits of *number*."""
    return NOTHING if number is None else f"{number:,}"


def share(part: float | None) -> str:
    """Say *part* (0 to 1) in per cent."""
    if part is None or not math.isfinite(part):
        return NOTHING
    if 0.9995 <= part < 1:  # noqa: PLR2004 (would be rounded to all of it, which it is not)
        return f"{min(part * 100, 99.999):.3f}%"
    return f"{part * 100:.1f}%"


def size(number: int | None) -> str:
    """Say how much *number* bytes are."""
    if number is None:
        return NOTHING
    amount = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < _BYTES:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.3g} {unit}"
        amount /= _BYTES
    return f"{amount:,.3g} TB" if amount < _BYTES else f"{amount:,.0f} TB"


def plural(number: int, one: str, many: str | None = None) -> str:
    """Put *number* before the form of the noun that it asks for."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def some(names: Iterable[str], most: int = 16) -> str:
    """Name things, or the first of many: ``gpu-1, gpu-2 and 4,094 more``."""
    named = list(names)
    return ", ".join(named[:most]) + (f" and {count(len(named) - most)} more" if len(named) > most else "")


def ranks(numbers: Iterable[int]) -> str:
    """Write a set of ranks as ranges."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs) or NOTHING  # noqa: RUF001 (a range)


def act(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a decision that say something; who goes on with a lost rank in words."""
    said = {name: value for name, value in fields.items() if value}
    if "seats" in said:
        said["seats"] = [seat(one) for one in said["seats"]]
    if "noted" in said:
        said["noted"] = list(said["noted"].values())
    return said


def seat(fields: Mapping[str, Any]) -> str:
    """Say in what process a rank goes on after a take-over."""
    number, node = fields.get("standby"), fields.get("node")
    return f"rank {fields.get('rank')} in " + (f"standby {number} on {node}" if number is not None else f"a fresh process on {node}")


def in_ranks(size: int, facts: Mapping[str, Any] | None) -> str:
    """Say how many ranks a generation of *size* has, and of how many while the places of some are vacant."""
    whole = (facts or {}).get("width") or size
    return plural(size, "rank") if whole <= size else f"{size:,} of {plural(whole, 'rank')}"


def kept(facts: Mapping[str, Any] | None) -> str:
    """Say how many ranks of a generation go on in the process they had in the one before; empty when none does."""
    living = (facts or {}).get("kept") or []
    return f", {count(len(living))} of them in the same process as before" if living else ""


def begun(incident: Incident) -> str:
    """Say that an incident began, in a line: what happened, where, and how soon it was detected."""
    soon = duration(max(0.0, incident.detected_at - incident.fault_at))
    return f"incident {incident.number}: {incident.kind} on {incident.subject}, detected after {soon}"


def over(incident: Incident) -> str:
    """Say that an incident is over, in a line: how it ended, what was done, and what it cost."""
    words = [f"incident {incident.number} {(incident.outcome or 'closed').replace('-', ' ')}"]
    if incident.outcome == "recovered":
        words += [f"by {incident.action}"] if incident.action else []
        words += [f"in {duration(incident.downtime_s)}"] if incident.downtime_s is not None else []
    again = "no step" if incident.steps_lost == 0 else plural(incident.steps_lost or 0, "step")
    more = [f"{again} computed again"] if incident.steps_lost is not None else []
    more += [f"now generation {incident.generation_after}"] if incident.generation_after is not None else []
    return ", ".join([" ".join(words), *more])


def _all(names: Iterable[str] | None) -> str:
    return ", ".join(names or ())


def _grown(node: str, facts: Mapping[str, Any]) -> str:
    """Say which counters of errors grew on a node."""
    counters = ", ".join(f"{name} +{growth}" for name, growth in facts["counters"].items())
    return f"on {node} there grew within {duration(facts['seconds'])}: {counters}"


def recovery_details(facts: Mapping[str, Any] | None) -> list[str]:
    """Say what a recovery did inside the workers, a sentence each; empty where nothing is known of that."""
    if not facts:
        return []
    beside = [f"the newest snapshot in memory was {plural(facts['snapshot_age'], 'step')} old"] if "snapshot_age" in facts else []
    beside += [_grown(node, one) for node, one in (facts.get("counter_increases") or {}).items()]
    if "rebuilt" not in facts:  # all processes were started anew
        return [*([f"all ranks went on from {_source(facts)}"] if "source" in facts else []), *beside]
    said = [f"{plural(facts.get('rebuilt') or 0, 'group')} built anew, {facts.get('kept') or 0} kept"]
    if facts.get("bytes"):
        speed = f" at {size(round(facts['bandwidth']))}/s" if facts.get("bandwidth") else ""
        over = "" if facts.get("source") == "memory" or not facts.get("interfaces") else f", over {_all(facts['interfaces'])}"
        said.append(f"{size(facts['bytes'])} of state taken from {_source(facts)}{speed}{over}")
    elif facts.get("source") == "checkpoint":
        said.append("no living rank held the state: all went on from a checkpoint")
    said += beside
    phases = {name: seconds for name, seconds in (facts.get("seconds") or {}).items() if seconds}
    if phases:
        said.append(
            "the slowest rank took " + ", ".join(f"{duration(seconds)} to {_PHASES.get(name, name)}" for name, seconds in phases.items())
        )
    for rank, one in (facts.get("coverage") or {}).items():
        new = one.get("first_met") or []
        met = f"; first met after the promotion: {', '.join(map(str, new))}" if new else ""
        said.append(f"rank {rank}: the warm-up had foreseen {one.get('foreseen')} of {one.get('calls')} calls of the first step{met}")
    return said


def source(facts: Mapping[str, Any] | None) -> str:
    """Say where the state came from that a recovery went on with; empty where that is not known."""
    return _source(facts) if facts and facts.get("source") else ""


def _source(facts: Mapping[str, Any]) -> str:
    match facts.get("source"):
        case "memory":
            replicas = facts.get("replicas")
            return "the memory of nodes" + (f" (replicas for {plural(replicas, 'rank')})" if replicas else "")
        case "checkpoint":
            return "a checkpoint"
    return "living ranks"


def visible(text: str) -> str:
    """Return *text* with every character that a reader could not see, or that reorders the others, made visible."""
    return "".join(char if _harmless(char) else _picture(char) for char in text.replace("\r\n", "\n"))


def _harmless(char: str) -> bool:
    kind = unicodedata.category(char)
    return char in _KEPT_CONTROLS or char == _FORMAT_KEPT or kind not in {"Cc", "Cf", "Cs", "Co", "Cn"}


def _picture(char: str) -> str:
    """Draw an ASCII control character as its own picture, anything else as its code point."""
    code = ord(char)
    if code < 32:  # noqa: PLR2004 (the first 32 code points have pictures from U+2400 on)
        return chr(0x2400 + code)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"  # noqa: PLR2004 (the end of the basic plane)


def clipped(text: str, limit: int) -> str:
    """Return *text*, or its two ends with a word on how much was left out between them."""
    if len(text) <= limit:
        return text
    head, tail = limit // 4, limit - limit // 4
    return f"{text[:head]}\n… {count(len(text) - limit)} characters left out …\n{text[-tail:]}"
