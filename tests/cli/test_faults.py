"""`holdfast faults ls` and `holdfast faults find` as their users meet them."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from holdfast.detectors.all_kinds import CATALOGUE, by_place
from holdfast.history import FaultRecord
from holdfast.history.store import History
from tests.cli.conftest import PROGRAM, Command, environment
from tests.cli.written_history import Author
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
