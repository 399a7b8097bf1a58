"""`holdfast explain`: what is made of a line, in words and as JSON."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import Command
from tests.mentions import mentions

XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=991, name=python, GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("line", "log", "acts", "words"),
    [
        (XID, None, True, ("evict", "the line proves it", "fallen off the bus", "xid.toml", "docs.nvidia.com", "monitor")),
        (XID, "output", False, ("cannot know of it", "the line in the kernel log")),
        (
            "mlx5_core 0000:9a:00.0 ens5f0np0: Link down",
            None,
            False,
            ("one line does not prove it", "a second signal", "job-hang"),
        ),
        (
            "nvidia-nvswitch2: SXid (PCI:0000:87:00.0): 22003, Non-fatal, Link 18 x",
            None,
            False,
            ("nvswitch.toml", "(?i), ?fatal,"),
        ),
        (XID.removeprefix("NVRM: "), None, False, ("if it is a line of the kernel log", "--log kernel")),
        (XID.removeprefix("NVRM: "), "kernel", True, ("the line proves it",)),
        ("CUDA error: uncorrectable ECC error encountered", None, False, ("if it is a line of a worker's output", "--log output")),
        ("CUDA error: uncorrectable ECC error encountered", "output", True, ("the line proves it",)),
        ("Xid 79 means that a GPU has fallen off the bus, see https://docs.nvidia.com/deploy/xid-errors", None, False, ("No fault",)),
        ("ERROR: widget 12 exploded, giving up", None, False, ("unknown", "no signature was written for it")),
        ("EDAC MC2: 3 CE memory scrubbing error on DIMM0", None, False, ("No fault", "a count of 100 or more")),
        ("sshd[871]: Failed password for root from 10.0.0.9 port 22 ssh2", None, False, ("No fault", "innocent.toml", "rules a fault out")),
        ("step 100 | loss 2.31", None, False, ("No fault", "its words report no failure")),
        ("ValueError: bad shape", None, False, ("applies where a rank has failed",)),
    ],
)
def test_a_line_is_explained(here: Command, line: str, log: str | None, *, acts: bool, words: tuple[str, ...]) -> None:
    """By what it was recognised, whether it acts and why, and what would change that."""
    more = ("--log", log) if log else ()
    said = here("explain", line, *more)
    assert said.returncode == 0
    assert mentions(said.stdout, *words)
    found = json.loads(here("explain", line, *more, "--json").stdout)
    assert found["acts"] is acts
    assert found["matched"]
    assert found["reason"]


def test_a_traceback_is_explained_by_its_exception(here: Command) -> None:
    """Several lines are one argument."""
    text = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    f()\nRuntimeError: No CUDA GPUs are available\n'
    assert mentions(here("explain", text).stdout, "cuda-no-device", "the exception that ended the traceback, RuntimeError")


def test_no_line_at_all_is_no_fault(here: Command) -> None:
    """An empty argument, and one of spaces."""
    for line in ("", "  \n "):
        assert mentions(here("explain", line).stdout, "No fault")


def test_lines_of_the_same_event_are_named_and_others_are_not(here: Command) -> None:
    """What a switch writes after its error belongs to it; the link of another device does not."""
    switch = "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 19047,"
    lines = f"{switch} Fatal, Link 32 sequence ID error\n{switch} Severity 1 Engine instance 32\nmlx5_core 0000:5e:00.0 eth2: Link down"
    found = json.loads(here("explain", lines, "--json").stdout)
    assert found["kind"] == "nvswitch-fatal"
    assert found["context"] == [f"nvswitch-fatal: {switch} Severity 1 Engine instance 32"]
    assert mentions(here("explain", lines).stdout, "together with", "Severity 1 Engine instance 32")
