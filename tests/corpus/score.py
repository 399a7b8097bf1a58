"""Measure false alarms and recall of the classifier on real logs that no author of a signature wrote.

Run it with `python -m tests.corpus.score --half tuning`. The sealed half is for judging a change that is complete: nobody reads its lines
beside the classifier's verdicts, so the list of false alarms exists for the tuning half only.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import lzma
import re
import tarfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from holdfast.classify import Classification, classify
from holdfast.classify.traceback_collector import MAX_GAP
from holdfast.detectors.catalogue import CATALOGUE
from holdfast.detectors.confirmation import acts_alone
from holdfast.detectors.log_lines.heuristics import OTHERS

HERE: Final = Path(__file__).parent
HALVES: Final = ("tuning", "sealed")
MAX_SHAPE: Final = 160
"""Characters of a line by which lines are compared."""
GOALS: Final = {"acting_per_100k": 0, "shown_percent": 1.0, "recall_percent": 95.0, "attribution_percent": 93.0}
_VARIES: Final = re.compile(
    r"0x[0-9a-fA-F]+|\b[0-9a-fA-F]{2}(?::[0-9a-fA-F]{2}){3,}|\b(?=[0-9a-f]*\d)[0-9a-fA-F]{6,}\b|\d+"
    r"|\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec|Mon|Tue|Wed|Thu|Fri|Sat|Sun)\b"
)

Key = tuple[str, str]
"""Origin and file."""


@dataclass(frozen=True, slots=True)
class Label:
    """What a person says of a line that has a word of trouble or matches a signature; all others are harmless."""

    verdict: Literal["fault", "context", "harmless"]
    """*context*: belongs to the event of a fault, such as a line of its call trace; it need not be found, and finding it is no mistake."""
    component: str = ""
    attributed_to: frozenset[str] = frozenset()
    """Attributions that are correct; empty if any is."""


@dataclass(slots=True)
class Tally:
    """What the classifier made of the lines of a half."""

    lines: int = 0
    unlabelled: int = 0
    """Lines that it flags although nobody has judged them: they have no word of trouble and matched no signature before."""
    false_alarms: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Origin, kind and shape."""
    acting: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Those of them that act."""
    faults: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Origin and shape."""
    found: Counter[tuple[str, str]] = field(default_factory=Counter)
    attributed: int = 0
    examples: dict[tuple[str, str, str], str] = field(default_factory=dict)
    """File and line of the first false alarm of its origin, kind and shape."""

    def add(self, other: Tally) -> None:
        """Add the counts of *other*."""
        self.lines += other.lines
        self.unlabelled += other.unlabelled
        self.attributed += other.attributed
        self.false_alarms += other.false_alarms
        self.acting += other.acting
        self.faults += other.faults
        self.found += other.found
        self.examples = other.examples | self.examples


def shape(line: str) -> str:
    """Return *line* without its numbers, addresses and names of months, as lines are compared."""
    return _VARIES.sub("#", line)[:MAX_SHAPE]


def acts(kind: str, line: str) -> bool:
    """Return whether *line*, of *kind*, leads by itself to more than a record or a closer look: in the log that such lines are written to.

    What a kind recommends to a job (a restart, the end with a user error) applies where a rank has failed, and never because of a line.
    """
    return acts_alone(CATALOGUE[kind], line)


@functools.cache
def sources() -> dict[str, dict[str, Any]]:
    """Return the description of every origin."""
    return tomllib.loads((HERE / "sources.toml").read_text())


def files_of(half: str) -> Iterator[tuple[Key, list[str]]]:
    """Yield the files of *half* with their lines, in the order of the table."""
    chosen: dict[str, list[str]] = {}
    for origin, name, where in rows("split.tsv"):
        if where == half:
            chosen.setdefault(origin, []).append(name)
    for origin, names in chosen.items():
        packed = io.BytesIO(lzma.decompress((HERE / "logs" / f"{origin}.tar.xz").read_bytes()))
        with tarfile.open(fileobj=packed) as archive:
            for name in names:
                member = archive.extractfile(name)
                assert member is not None, f"{name} in {origin} is no file"
                yield (origin, name), member.read().decode().split("\n")[:-1]


def rows(table: str) -> Iterator[list[str]]:
    """Yield the rows of a table of tab-separated values, without its head."""
    for line in (HERE / table).read_text().splitlines()[1:]:
        yield line.split("\t")


def labels() -> dict[Key, dict[int, Label]]:
    """Return the labels of all lines that were judged, by their number from 1."""
    judged: dict[Key, dict[int, Label]] = {}
    for origin, name, numbers, verdict, component, attributed_to in rows("labels.tsv"):
        assert verdict in {"fault", "context", "harmless"}, verdict
        label = Label(verdict, component, frozenset(attributed_to.split("|")) - {""})  # type: ignore[arg-type]  # asserted
        of_file = judged.setdefault((origin, name), {})
        for part in numbers.split(","):
            first, _, last = part.partition("-")
            of_file.update(dict.fromkeys(range(int(first), int(last or first) + 1), label))
    return judged


def flagged(lines: list[str]) -> list[Classification]:
    """Return what `holdfast faults find` reports for *lines* as one stream."""
    stream = io.BytesIO("".join(f"{line}\n" for line in lines).encode())
    return [fault for page in classify(stream.read) for fault in page.faults]


def event(fault: Classification, lines: list[str]) -> list[int]:
    """Return the numbers of the lines of *fault*: one, or those of a traceback, between which other ranks may print theirs."""
    numbers = [fault.line]
    for one in filter(str.strip, fault.text.split("\n")[1:]):
        ahead = range(numbers[-1], min(numbers[-1] + MAX_GAP + 1, len(lines)))
        numbers += next(([index + 1] for index in ahead if lines[index].endswith(one)), [])
    return numbers


def tally(key: Key, lines: list[str], judged: Mapping[int, Label]) -> Tally:
    """Compare the classifier's verdicts on a file with its labels: a traceback is one verdict, on all of its lines."""
    origin, name = key
    result = Tally(lines=len(lines))
    kinds: dict[int, str] = {}
    for fault in flagged(lines):
        numbers = event(fault, lines)
        kinds.update(dict.fromkeys(numbers, fault.kind))
        found = [judged[number] for number in numbers if number in judged]
        if not found:
            result.unlabelled += 1
        if all(label.verdict == "harmless" for label in found):
            alarm = origin, fault.kind, shape(lines[fault.line - 1])
            result.false_alarms[alarm] += 1
            result.acting[alarm] += acts(fault.kind, fault.text)
            result.examples.setdefault(alarm, f"{name}:{fault.line}")
    for number, label in judged.items():
        if label.verdict != "fault":
            continue
        fault_shape = origin, shape(lines[number - 1])
        result.faults[fault_shape] += 1
        if kind := kinds.get(number):
            result.found[fault_shape] += 1
            result.attributed += not label.attributed_to or CATALOGUE[kind].attributed_to in label.attributed_to
    return result


def measure(half: str) -> Tally:
    """Return the tally of all files of *half*."""
    judged = labels()
    total = Tally()
    for key, lines in files_of(half):
        total.add(tally(key, lines, judged.get(key, {})))
    return total


def report(half: str, total: Tally, *, breakdown: bool) -> dict[str, Any]:
    """Return the figures of *half* with their goals, as JSON values; *breakdown*: also the false alarms by origin and kind."""
    shown, acting = total.false_alarms.total(), total.acting.total()
    by_words = sum(n for (_, kind, _), n in total.false_alarms.items() if kind in OTHERS)
    faults, found = total.faults.total(), total.found.total()

    def figure(value: float, n: int, goal: float, *, at_most: bool) -> dict[str, Any]:
        met = bool(n) and (value <= goal if at_most else value >= goal)
        return {"median": round(value, 2), "n": n, "goal": f"{'<=' if at_most else '>='} {goal:g}", "met": met}

    def percent(part: int, whole: int) -> float:
        return 100 * part / whole if whole else 0.0

    by_origin: Counter[str] = Counter()
    by_kind: Counter[str] = Counter()
    for (origin, kind, _), times in total.false_alarms.items():
        by_origin[origin] += times
        by_kind[kind] += times
    parts = {
        "false alarms by origin": dict(by_origin.most_common()),
        "false alarms by kind": dict(by_kind.most_common()),
    }
    return {
        "half": half,
        "lines": total.lines,
        "false alarms that act, per 100,000 lines": {
            **figure(percent(acting, total.lines) * 1000, total.lines, GOALS["acting_per_100k"], at_most=True),
            "times": acting,
        },
        "false alarms shown, % of lines": {
            **figure(percent(shown, total.lines), total.lines, GOALS["shown_percent"], at_most=True),
            "times": shown,
            "per_100k": round(percent(shown, total.lines) * 1000, 1),
            "by words alone": by_words,
            "not judged": total.unlabelled,
        },
        "recall of labelled faults, %": {
            **figure(percent(found, faults), faults, GOALS["recall_percent"], at_most=False),
            "of shapes": round(percent(len(total.found), len(total.faults)), 2),
            "shapes": len(total.faults),
        },
        "correct attribution, % of the faults found": figure(
            percent(total.attributed, found), found, GOALS["attribution_percent"], at_most=False
        ),
        **(parts if breakdown else {}),
    }


def listing(total: Tally) -> Iterator[str]:
    """Yield the false alarms by shape, most frequent first, and then the faults that were missed."""
    yield "false alarms: times, kind, whether it acts, recommended action, origin, first place, shape"
    for alarm, times in total.false_alarms.most_common():
        origin, kind, line = alarm
        acting = "acts" if total.acting[alarm] else "-"
        yield f"{times}\t{kind}\t{acting}\t{CATALOGUE[kind].recommended_action}\t{origin}\t{total.examples[alarm]}\t{line}"
    yield "missed faults: times, origin, shape"
    for (origin, line), times in (total.faults - total.found).most_common():
        yield f"{times}\t{origin}\t{line}"


def main() -> None:
    """Print the figures of a half."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=HALVES, default="tuning")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--list", type=Path, metavar="FILE", help="write the false alarms and the missed faults of the tuning half there")
    parser.add_argument(
        "--breakdown", action="store_true", help="false alarms of the sealed half by origin and kind: after its last use only"
    )
    given = parser.parse_args()
    if given.list and given.half != "tuning":
        parser.error("--list: the sealed half is not listed, as whoever reads its false alarms tunes to them; use --half tuning")
    total = measure(given.half)
    text = json.dumps(report(given.half, total, breakdown=given.half == "tuning" or given.breakdown), indent=2)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")
    if given.list:
        given.list.write_text("\n".join([*listing(total), ""]))


if __name__ == "__main__":
    main()
