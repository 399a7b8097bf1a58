"""`holdfast health`."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from detectors.catalogue import Fault, RecommendedAction
from detectors.codec import MalformedData, packed, unpacked
from detectors.health import judge, unknown_signals
from detectors.readings import NodeReading
from holdfast.cli.output import say, say_json, say_rows
from holdfast.errors import BadFile, NotReadable, Problem
from holdfast.probe.readers.local import read_node
from holdfast.report.wording import plural

READING = "reading"
"""Where the look itself stands in the JSON."""


def health(since: Path | None, *, deadline: float, as_json: bool) -> int:
    """Look at this machine, tell its faults and what could not be seen; return 1 when a fault asks for more than to be recorded."""
    before = _earlier(since) if since is not None else None
    now = read_node(os.uname().nodename, seconds=deadline)
    faults, blind = judge(now, before), list(unknown_signals(now))
    if as_json:
        say_json({"node": now.node, "faults": [_record(fault) for fault in faults], "blind": dict(blind), READING: packed(now)})
    else:
        _tell(now.node, faults, blind)
    return int(any(fault.entry.recommended_action is not RecommendedAction.RECORD for fault in faults))


def _tell(node: str, faults: list[Fault], blind: list[tuple[str, str]]) -> None:
    if faults:
        rows = [(one.kind, one.entry.recommended_action, f"{one.quote}\n-> {one.entry.action}") for one in faults]
        say_rows(("FAULT", "LEVEL", "SEEN, AND WHAT TO DO"), rows, last="folded")
    else:
        say(f"No fault was seen on {node}.")
    if blind:
        say(f"\n{plural(len(blind), 'thing')} could not be seen:")
        say_rows(("PART", "WHY"), blind)


def _record(fault: Fault) -> dict[str, Any]:
    """Return a fault as JSON, with what the catalogue says about its kind."""
    entry = fault.entry
    return {
        **{name: value for name, value in dataclasses.asdict(fault).items() if value not in (None, "")},
        "title": entry.title,
        "recommended_action": entry.recommended_action,
        "blame": entry.blame,
        "action": entry.action,
    }


def _earlier(path: Path) -> NodeReading:
    """Return the look that an earlier output of this command holds."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return unpacked(NodeReading, told[READING])
    except OSError as error:
        raise NotReadable("the earlier look", str(path), error.strerror or str(error)) from error
    except (ValueError, KeyError, TypeError, MalformedData) as error:
        why = f": {error}" if isinstance(error, MalformedData) else ""
        cure = "Name a file written by `holdfast health --local --json`"
        raise BadFile(str(path), (Problem(field=READING, reason=f"holds no look at a node{why}", cure=cure),)) from error
