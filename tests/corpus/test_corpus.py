"""The corpus of real logs: large, from many places, split once, labelled, and free of what is personal."""

from __future__ import annotations

import functools
import ipaddress
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from holdfast.detectors.catalogue import AREAS, Attribution
from tests.corpus.score import HALVES, Label, Tally, acts, files_of, labels, report, rows, shape, sources, tally

MAIL = re.compile(r"\b[\w.+-]+@(?:[\w-]+\.)+(?:com|net|org|de|ru|fr|uk|edu)\b")
ADDRESS = re.compile(r"(?<![\w.:-])\d{1,3}(?:\.\d{1,3}){3}(?![\w.-])")
OURS = re.compile(r"(?:[0-9]|10|255|22[4-9]|23\d|24\d|25\d)\.")
"""Versions, and addresses that name nobody."""


@functools.cache
def corpus() -> dict[tuple[str, str], list[str]]:
    """Return the lines of all files."""
    return {key: lines for half in HALVES for key, lines in files_of(half)}


def test_it_is_large_and_from_many_places() -> None:
    """No origin has more than 15 % of the lines, and a quarter at most was recorded here."""
    count: Counter[str] = Counter()
    for (origin, _), lines in corpus().items():
        count[origin] += len(lines)
    assert count == {origin: about["lines"] for origin, about in sources().items()}
    assert count.total() >= 100_000
    assert len(count) >= 20
    assert max(count.values()) <= 0.15 * count.total()
    assert sum(count[origin] for origin, about in sources().items() if about["recorded_by_us"]) <= 0.25 * count.total()
    assert all(about[key] for about in sources().values() for key in ("kind", "what", "source", "licence"))


def test_the_sealed_half_is_large_and_of_origins_of_its_own() -> None:
    """Each file is in one half, and no origin is in both: who has worked with the tuning half knows nothing of the sealed one."""
    table = list(rows("split.tsv"))
    assert len(table) == len({(origin, name) for origin, name, _ in table}) == len(corpus())
    tuning, sealed = ({origin for origin, _, where in table if where == half} for half in HALVES)
    assert not tuning & sealed
    assert len(sealed) >= 12
    count = Counter({origin: sources()[origin]["lines"] for origin in sealed})
    assert count.total() >= 34_000
    assert sum(count[origin] for origin in sealed if sources()[origin]["recorded_by_us"]) <= 0.25 * count.total()
    judged = labels()
    faults = [
        (key[0], shape(lines[number - 1]))
        for key, lines in files_of("sealed")
        for number, label in judged.get(key, {}).items()
        if label.verdict == "fault"
    ]
    assert len(faults) >= 120
    assert sum(sources()[origin]["recorded_by_us"] for origin, _ in faults) <= len(faults) / 3
    assert len(set(faults)) >= 60


def test_every_label_is_of_a_line_that_exists() -> None:
    """Both halves have faults of several components."""
    half_of = {(origin, name): half for origin, name, half in rows("split.tsv")}
    components: dict[str, set[str]] = {half: set() for half in HALVES}
    attributions = {str(one) for one in Attribution}
    for key, judged in labels().items():
        assert max(judged) <= len(corpus()[key]), key
        assert all(label.attributed_to <= attributions for label in judged.values()), key
        components[half_of[key]] |= {label.component for label in judged.values() if label.verdict == "fault"}
    assert all(len(found) >= 5 and found <= AREAS.keys() for found in components.values()), components


def test_nothing_in_it_names_a_person_or_a_public_address() -> None:
    """Stand-ins of the same form are there instead."""
    for key, lines in corpus().items():
        for line in lines:
            mails = [mail for mail in MAIL.findall(line) if not re.search(r"@(?:[\w-]+\.)*(?:example\.\w+|host\d+\.\w+)$", mail)]
            assert not mails, (key, line)
            for found in ADDRESS.findall(line):
                try:
                    address = ipaddress.ip_address(found)
                except ValueError:
                    continue  # a version such as 1.2.3.400
                assert not address.is_global or OURS.match(found), (key, line)


def test_a_tally_tells_false_alarms_misses_and_wrong_attributions_apart() -> None:
    """One line of each sort, judged by hand."""
    lines = [
        "step 100 | loss 2.31",
        "kernel: NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus.",
        "kernel: NVRM: Xid (PCI:0000:45:00): 79, GPU has fallen off the bus.",
        "kernel: NVRM: Xid (PCI:0000:46:00): 79, GPU has fallen off the bus.",
        "kernel: NVRM: Xid (PCI:0000:47:00): 79, GPU has fallen off the bus.",
        "an event without words",
    ]
    gpu, disk = Label("fault", "accelerator", frozenset({"gpu"})), Label("fault", "disk", frozenset({"storage"}))
    judged = {2: gpu, 3: disk, 4: Label("harmless"), 5: Label("context"), 6: disk}
    found = tally(("origin", "file"), lines, judged)
    assert (found.lines, found.faults.total(), found.found.total(), found.attributed, found.unlabelled) == (6, 3, 2, 1, 0)
    ((_, kind, line),) = found.false_alarms
    assert found.acting.total() == acts(kind, lines[3]) == 1, line
    assert list(found.examples.values()) == ["file:4"]


def test_the_report_has_figures_and_goals_and_keeps_the_seal(tmp_path: Path) -> None:
    """The tuning half is scored whole; the sealed one is not scored by a test, and its lines are never listed."""
    command = [sys.executable, "-m", "tests.corpus.score"]
    subprocess.run([*command, "--half", "tuning", "--json", str(tmp_path / "tuning")], check=True, capture_output=True)
    of_tuning = json.loads((tmp_path / "tuning").read_text())
    of_sealed = report("sealed", Tally(lines=1), breakdown=False)
    for figures in (of_tuning, of_sealed):
        judged = [value for value in figures.values() if isinstance(value, dict) and "goal" in value]
        assert len(judged) == 4
        assert all({"median", "n", "goal", "met"} <= value.keys() for value in judged)
    assert "false alarms by kind" in of_tuning
    assert "false alarms by kind" not in of_sealed
    refused = subprocess.run([*command, "--half", "sealed", "--list", str(tmp_path / "list")], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "tunes to them" in refused.stderr
    assert not (tmp_path / "list").exists()


@pytest.mark.parametrize("half", HALVES)
def test_few_lines_of_an_origin_look_alike(half: str) -> None:
    """A line that a log repeats a thousand times would count a thousand times."""
    repeated: Counter[tuple[str, str]] = Counter((key[0], shape(line)) for key, lines in files_of(half) for line in lines)
    assert max(repeated.values()) <= 60
