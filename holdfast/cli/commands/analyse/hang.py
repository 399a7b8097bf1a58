"""`holdfast faults hang`: which rank blocks a hanging job, from the dumps of torch's flight recorder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from holdfast.cli.output import clock, echo, echo_json, echo_table, hint
from holdfast.detectors.catalogue import CATALOGUE
from holdfast.detectors.training.flight_recorder import Dump, NotADump, explained, missing, rank_of, read, unfinished
from holdfast.detectors.training.hang_analysis import numbered
from holdfast.errors import NotReadable
from holdfast.report.text.wording import visible

_WHAT: Final = "the dump"
_LARGEST: Final = 1 << 30
"""Bytes of a dump; one of torch's default of 2000 operations has a few MB."""


def explain_hang(dumps: tuple[Path, ...], *, as_json: bool) -> int:
    """Print which rank blocks the others; return 0 also if the dumps do not show it."""
    found = _read_all(dumps)
    result, absent = explained(found), missing(found)
    waits = [(rank, one.words, one.place, one.at) for rank, one in unfinished(found)]
    if as_json:
        echo_json(
            {
                "rank": None if result is None else result.rank,
                "kind": (result.kind if result is not None else "") or None,
                "text": None if result is None else result.quote,
                "missing": list(absent),
                "unfinished": [{"rank": rank, "operation": words, "place": place, "at": at} for rank, words, place, at in waits],
            }
        )
        return 0
    if result is not None:
        echo(visible(result.quote))
    else:
        echo("The dumps do not show which rank blocks the others." if waits else "No rank waits: all operations are finished.")
    if waits:
        echo()
        rows = [(str(rank), visible(words), clock(at), visible(place) or "-") for rank, words, place, at in waits]
        echo_table(("RANK", "WAITS AT", "SINCE", "PLACE"), rows)
    if absent:
        hint(f"No dump of {numbered(absent)}: whether others wait for {'it' if len(absent) == 1 else 'them'} is not known.")
    if result is not None and result.kind:
        hint(f"{result.kind}: {CATALOGUE[result.kind].action}")
    return 0


def _read_all(paths: Iterable[Path]) -> dict[int, Dump]:
    found = dict[int, Dump]()
    for path in paths:
        rank = rank_of(path.name)
        if rank is None:
            raise NotReadable(_WHAT, str(path), "its name does not end with a rank", "Name it as torch does, such as trace_rank_3")
        if rank in found:
            raise NotReadable(_WHAT, str(path), f"another dump is of rank {rank} too", "Name one dump of each rank, of one hang")
        found[rank] = _read(path)
    return found


def _read(path: Path) -> Dump:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
    except IsADirectoryError as error:
        raise NotReadable(_WHAT, str(path), "it is a directory", "Name the files in it") from error
    except FileNotFoundError as error:
        raise NotReadable(_WHAT, str(path), "there is no such file", "Check the path") from error
    except OSError as error:
        raise NotReadable(_WHAT, str(path), error.strerror or str(error)) from error
    if len(data) > _LARGEST:
        raise NotReadable(_WHAT, str(path), "it has more than 1 GiB", "Name a dump of torch's flight recorder")
    try:
        return read(data)
    except NotADump as error:
        cure = "Name a dump of torch's flight recorder, complete, as a pickle or as JSON"
        raise NotReadable(_WHAT, str(path), f"it is none ({error})", cure) from error
