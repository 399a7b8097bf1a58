"""`holdfast faults ls` and `holdfast faults find` as their users meet them."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from holdfast.classify.origin import log_of
from holdfast.detectors.all_kinds import CATALOGUE, by_place
from holdfast.detectors.catalogue import KERNEL_LOG, FaultKind
from holdfast.detectors.evidence import LogLine
from holdfast.history import FaultRecord
from holdfast.history.store import History
from tests.classify.test_certain import ROWS as CERTAIN_LINES
from tests.cli.conftest import PROGRAM, Command, environment
from tests.cli.written_history import Author
from tests.each import each
from tests.mentions import mentions

OFF_BUS = "NVRM: Xid (PCI:0000:3b:00): 79, pid=991, name=python, GPU has fallen off the bus."

ON = ("measured", "line", "second-signal", "never")


def a_fault(author: Author, **evidence: str) -> FaultRecord:
    """Return the exit of a worker that has no more specific kind."""
    return FaultRecord(
        job_id=author.job.id, at=1.0, kind="worker-exit-code", recommended_action="restart", target="rank 1 on n0", attributed_to="process",
        node="n0",
        generation=1, evidence=evidence,
    )  # fmt: skip


def test_faults_lists_and_filters(here: Command) -> None:
    """What is left is what all options leave."""
    everything = json.loads(here("faults", "ls", "--json").stdout)
    assert [one["id"] for one in everything] == [one.id for one in by_place()]
    some = json.loads(here("faults", "ls", "--area", "hardware", "--recommended-action", "evict", "--words", "bus", "--json").stdout)
    assert "gpu-off-bus" in {one["id"] for one in some}
    assert all(one["area"] == "hardware" and one["recommended_action"] == "evict" for one in some)
    text = here("faults", "ls", "--component", "nvlink", "--attributed-to", "gpu")
    assert text.stdout.splitlines()[0].split()[:2] == ["KIND", "AREA"]
    assert " of " in text.stderr


def test_faults_are_listed_by_what_they_act_on(here: Command) -> None:
    """A measured value, one line, a line with a second signal, or nothing; another word is refused with those that there are."""
    listed = {on: {one["id"]: one for one in json.loads(here("faults", "ls", "--acts", on, "--json").stdout)} for on in ON}
    assert all(on in one["acts"] for on in ON for one in listed[on].values())
    assert listed["measured"].keys() & listed["line"].keys() >= {"gpu-off-bus"}
    assert "gpu-memory-double-bit" in listed["line"]
    assert "link-down" in listed["second-signal"]
    assert {"gpu-memory-remap-pending", "hardware-other"} <= listed["never"].keys()
    assert set().union(*listed.values()) == CATALOGUE.keys()
    refused = here("faults", "ls", "--acts", "soon")
    assert refused.returncode == 2
    assert "--acts does not accept 'soon'" in refused.stderr
    assert "second-signal" in refused.stderr


def test_faults_show_explains_one_kind(here: Command) -> None:
    """As text and as JSON; a kind that the controller detects shows its evidence."""
    text = here("faults", "show", "gpu-off-bus").stdout
    for words in ("gpu-off-bus: A GPU", "evict", "replace the node", "healthy", "pcie-device-gone:"):
        assert words in text
    output = json.loads(here("faults", "show", "gpu-off-bus", "--json").stdout)
    assert output["unhealthy"].startswith("NodeReading(")
    assert "AgentUnreachable(" in here("faults", "show", "node-lost").stdout


def test_a_kind_is_found_by_what_logs_call_it_though_devices_show_it_too(here: Command) -> None:
    """A user with an Xid 79 in a log searches for that."""
    assert "gpu-off-bus" in here("faults", "ls", "--words", "xid 79").stdout
    text = here("faults", "show", "gpu-off-bus").stdout
    assert mentions(text, "Xid 79", "evict")
    assert "has fallen off the bus" in text, "the driver's own words"


@pytest.mark.parametrize(
    ("option", "given", "known"),
    [
        ("--area", "hardwear", "hardware"),
        ("--component", "nvlnk", "nvlink"),
        ("--recommended-action", "evct", "evict"),
        ("--attributed-to", "gp", "gpu"),
    ],
)
def test_an_unknown_filter_value_is_refused(here: Command, option: str, given: str, known: str) -> None:
    """An empty list would suggest that there are no such faults."""
    for more in ([], ["--json"]):
        done = here("faults", "ls", option, given, *more)
        assert done.returncode == 2
        assert known in done.stderr.partition("Give one of")[2]
    assert f"None of {len(CATALOGUE)} kinds" in here("faults", "ls", "--words", "nothing-is-called-this").stderr


def test_a_kind_that_does_not_exist_names_the_nearest(here: Command) -> None:
    """Exit status 2, as for every user error."""
    done = here("faults", "show", "gpu-of-bus")
    assert done.returncode == 2
    assert mentions(done.stderr, "gpu-off-bus")
    assert mentions(here("faults", "show", "job-zombie").stderr, "Did you mean training-frozen?")


def test_faults_unknown_counts_unclassified_failures(here: Command, running: Author, book: History) -> None:
    """The most frequent first; what a signature knows by now is left out."""
    for number in range(3):
        running.write(a_fault(running, quote=f"exited with status 3; last output: frobnicator {number} gave up"))
    running.write(a_fault(running, quote="exited with status 1", detail=f"hello\n{OFF_BUS}\n"))
    found = json.loads(here("faults", "unknown", "--json").stdout)
    shapes = {one["shape"]: one["times"] for one in found}
    ((shape, times),) = shapes.items()
    assert (mentions(shape, "frobnicator N gave up"), times) == (True, 3)
    assert "frobnicator" in here("faults", "unknown").stdout
    assert "match = ['" in here("faults", "unknown", "--draft").stdout


def test_faults_unknown_of_an_empty_history_is_no_error(here: Command) -> None:
    """A fresh machine knows of no failure."""
    done = here("faults", "unknown")
    assert (done.returncode, done.stdout) == (0, "")
    assert json.loads(here("faults", "unknown", "--json").stdout) == []


def test_classify_reads_a_file_and_standard_input(holdfast_home: Path, tmp_path: Path) -> None:
    """Faults on the output, the sum on the error output; 0 whatever was found."""
    log = tmp_path / "train.log"
    log.write_text(f"step 1\n{OFF_BUS}\n")
    for arguments, text in (
        (("faults", "find", str(log)), ""),
        (("faults", "find", "-"), log.read_text()),
        (("faults", "find"), log.read_text()),
    ):
        done = subprocess.run([*PROGRAM, *arguments], env=environment(), input=text, capture_output=True, text=True, check=True)
        (line,) = done.stdout.splitlines()
        assert mentions(line, "2", "gpu-off-bus", "evict", "gpu", OFF_BUS)
        assert "2 lines, 1 fault" in done.stderr
    done = subprocess.run([*PROGRAM, "faults", "find", "--json", str(log)], env=environment(), capture_output=True, text=True, check=True)
    assert [json.loads(line)["classification"] for line in done.stdout.splitlines()] == ["benign", "fault"]
    assert list((holdfast_home / "cache").glob("*.hyperscan"))


@pytest.mark.parametrize("closed", ["<&-", ">&-", ">&- 2>&-"])
def test_a_closed_input_or_output_is_no_accident(holdfast_home: Path, tmp_path: Path, closed: str) -> None:
    """Daemons start programs that way. A closed output gets nothing, and a closed input is named."""
    (tmp_path / "said").write_text(f"hello\n{OFF_BUS}\n")
    source = closed if "<" in closed else f"{closed} < {tmp_path / 'said'}"
    command = f"{shlex.join(PROGRAM)} faults find - {source}"
    done = subprocess.run(["bash", "-c", command], env=environment(), capture_output=True, text=True, check=False, timeout=60)
    assert "Traceback" not in done.stderr
    assert done.returncode == (2 if "<" in closed else 0), done.stderr
    assert ("input is closed" in done.stderr) == ("<" in closed)


def test_a_log_that_cannot_be_read_is_named_with_the_cure(here: Command, tmp_path: Path) -> None:
    """A missing file, and a folder."""
    for path, cure in ((tmp_path / "no.log", "Check the path"), (tmp_path, "Name a file in it")):
        done = here("faults", "find", str(path))
        assert done.returncode == 2
        assert str(path) in done.stderr
        assert "cannot be read" in done.stderr
        assert cure in done.stderr


PROSE = (
    "Xid 79 means that a GPU has fallen off the bus, see https://docs.nvidia.com/deploy/xid-errors",
    'assistant: The error "GPU has fallen off the bus" (Xid 79) usually means hardware.',
    '{"loss": 2.31, "text": "NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus."}',
    "[   88.223123] NVRM: Xid 79 would be reported here if the GPU fell off the bus",
)


def results(here: Command, log: Path, *options: str) -> list[dict[str, Any]]:
    """Return what `faults find --json` says of each line."""
    return [json.loads(line) for line in here("faults", "find", str(log), "--json", *options).stdout.splitlines()]


def test_a_sentence_about_a_fault_does_not_act(here: Command, tmp_path: Path) -> None:
    """Without a kernel stamp or a driver's name at its start, a line acts only if the caller says that it is of the kernel log."""
    log = tmp_path / "chat.log"
    log.write_text("\n".join(PROSE))
    assert [one["acts"] for one in results(here, log)] == [False] * 4
    assert "(evict," not in (text := here("faults", "find", str(log)).stdout)
    assert "(evict if it is a line of the kernel log," in text
    assert [one["acts"] for one in results(here, log, "--log", "kernel")] == [False, False, True, False]
    assert [one["acts"] for one in results(here, log, "--log", "output")] == [False] * 4
    assert "(evict if the kernel log says it," in here("faults", "find", str(log), "--log", "output").stdout


def test_a_line_that_begins_as_the_kernel_s_do_acts(here: Command, tmp_path: Path) -> None:
    """As dmesg, syslog and the journal print it; what any other program prints does not."""
    kernel = (
        "",
        "[   88.22] ",
        "[Fri Aug 30 11:43:14 2024] ",
        "<3>[ 8.2] ",
        "kern  :err   : [ 8.2] ",
        "kernel: ",
        "Mar 27 17:40:36 n3 kernel: ",
        "2026-01-25T10:34:54.859532+00:00 n3 kernel: [ 8.2] ",
    )
    others = ("Mar 27 17:40:36 n3 sshd[7]: ", "rank 3: ", "says ", "step 4 | ")
    log = tmp_path / "x.log"
    log.write_text("\n".join(f"{start}{OFF_BUS}" for start in (*kernel, *others)))
    assert [one["acts"] for one in results(here, log)] == [True] * len(kernel) + [False] * len(others)


@each("row", [row for row in CERTAIN_LINES if row["acts"] == "yes" and CATALOGUE[row["kind"]].logs == (KERNEL_LOG,)])
def test_each_posted_line_of_the_kernel_is_told_by_its_beginning(row: dict[str, str]) -> None:
    """Those that act."""
    assert log_of(row["line"]) == KERNEL_LOG


def test_lines_that_only_words_tell_are_counted(here: Command, tmp_path: Path) -> None:
    """They are no event each: a number for each kind and two of them, in text; all on demand, and in JSON."""
    log = tmp_path / "x.log"
    log.write_text(
        "".join(f"{'fine' * 4}\n" * 30 + f"auditd[{number}]: daemon {'x' * number} died, giving up\n" for number in range(9)) + OFF_BUS
    )
    done = here("faults", "find", str(log))
    lines = done.stdout.splitlines()
    assert [line.split(" ")[1] for line in lines if "(" in line.partition(":")[2][:20]] == ["gpu-off-bus"]
    assert "host-other: 9 lines by words alone, such as" in lines
    assert sum("giving up" in line for line in lines) == 2
    assert "1 fault of 1 kind" in done.stderr
    assert "9 further lines" in done.stderr
    assert here("faults", "find", str(log), "--all").stdout.count("giving up") == 9
    assert sum(one["kind"] == "host-other" for one in results(here, log)) == 9


def test_events_are_in_the_order_of_their_first_lines(here: Command, tmp_path: Path) -> None:
    """An event that goes on for long began before a short one within it."""
    disk = "I/O error, dev sdb, sector {} op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 2"
    log = tmp_path / "x.log"
    log.write_text(
        "\n".join([disk.format(1), OFF_BUS, *(text for number in range(4) for text in (*["fine"] * 15, disk.format(number))), ""])
    )
    assert [line.partition(":")[0] for line in here("faults", "find", str(log)).stdout.splitlines()] == ["1", "2"]


def test_find_explain_and_ls_say_the_same_of_every_kind(holdfast: Command, tmp_path: Path) -> None:
    """A kind that devices and logs both show is defined twice, and the definition with the measured value counts."""
    catalogue = {one["id"]: one for one in json.loads(holdfast("faults", "ls", "--json").stdout)}
    log = tmp_path / "kinds.log"
    log.write_text("\n".join(signature_line(kind) for kind in CATALOGUE.values()) + "\n")
    found: dict[str, dict[str, Any]] = {}
    for line in holdfast("faults", "find", str(log), "--json").stdout.splitlines():
        if (one := json.loads(line))["kind"] is not None:
            found.setdefault(one["kind"], one)
    assert len(found) > 300
    fields = ("attributed_to", "recommended_action", "action")
    for name, one in found.items():
        assert [one[field] for field in fields] == [catalogue[name][field] for field in fields], name
    for name in ("disk-full", "filesystem-read-only", "loss-not-finite", "gpu-pages-retired"):
        told = json.loads(holdfast("explain", found[name]["text"], "--json").stdout)
        assert (told["kind"], told["recommended_action"], told["advice"]) == (
            name,
            catalogue[name]["recommended_action"],
            catalogue[name]["action"],
        )


def signature_line(kind: FaultKind) -> str:
    """Return a line of *kind*, as the tables of logs have it; empty for what is only measured."""
    evidence = kind.unhealthy.evidence
    text = kind.in_logs.partition("): ")[2] or (evidence.text if isinstance(evidence, LogLine) else "")
    return text.partition("\n")[0]
