"""`make gpu` without a card: it says what is missing; and the table that it prints on one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.__main__ import ROOT, not_shared, run, table
from tests.gpu.one_card import settings
from tests.gpu.record import Outcome
from tests.mentions import mentions

CASES = """
import os, pytest
def test_good(): pass
def test_bad(): assert 1 == 2, "the weights differ"
@pytest.mark.skip(reason="needs an NVIDIA GPU of another kind")
def test_other(): pass
def test_crashes(): os._exit(7)
def test_after(): pass
"""
HANGS = """
import time
def test_hangs():
    open("hangs", "w").close()
    time.sleep(1000)
def test_last(): pass
"""


def outcomes_of(folder: Path, seconds: float) -> list[Outcome]:
    """Run the tests in *folder* as `make gpu` does."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "tests.gpu.record"]
    with (folder / "log").open("w") as output:
        found = run([*command, "--rootdir", str(folder), "test_cases.py"], folder, output, seconds, where=folder)
    return list(found.values())


def test_the_table_says_what_became_of_each_test(tmp_path: Path) -> None:
    """With the reason. A test that takes its process down costs no other its result."""
    (tmp_path / "test_cases.py").write_text(CASES)
    found = outcomes_of(tmp_path, 100.0)
    assert [(one.name, one.outcome) for one in found] == [
        ("test_cases: test_good", "passed"),
        ("test_cases: test_bad", "failed"),
        ("test_cases: test_other", "skipped"),
        ("test_cases: test_crashes", "failed"),
        ("test_cases: test_after", "passed"),
    ]
    text = table(found, {"card": "H100", "driver": "580.1", "torch": "2.13.0", "NCCL": "2.29.7"})
    assert mentions(text, "card H100", "the weights differ", "another kind", "status 7", "2 passed, 2 failed, 1 skipped")


def test_a_test_that_hangs_fails_and_those_after_it_were_not_run(tmp_path: Path) -> None:
    """However long pytest takes to come to it."""
    (tmp_path / "test_cases.py").write_text(HANGS)
    for seconds in (4.0, 20.0, 80.0):
        (tmp_path / "record.jsonl").unlink(missing_ok=True)
        found = outcomes_of(tmp_path, seconds)
        if (tmp_path / "hangs").exists():
            break
    assert [(one.name, one.outcome) for one in found] == [("test_cases: test_hangs", "failed"), ("test_cases: test_last", "not run")]
    assert mentions(table(found, {}), "did not end in time", "0 passed, 1 failed, 0 skipped, 1 not run")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said without a GPU")
def test_without_a_card_one_sentence_says_what_is_missing() -> None:
    """Status 0: a machine without a GPU fails nothing."""
    ended = subprocess.run([sys.executable, "-m", "tests.gpu"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("\n") == 1
    assert mentions(ended.stdout, "nothing was run", "torch")


def test_a_card_that_one_process_may_use_is_named_as_such() -> None:
    """Each rank would fail otherwise, in words of CUDA's."""
    assert mentions(not_shared("Exclusive_Process") or "", "compute mode is Exclusive_Process", "nvidia-smi -c DEFAULT")
    assert not_shared("Default") is None
    assert not_shared("unknown (FileNotFoundError)") is None


def test_ranks_that_share_a_card_look_like_different_hosts_or_say_so() -> None:
    """By the version of NCCL."""
    old = [settings(rank, (2, 29, 7)) for rank in range(2)]
    assert old[0]["NCCL_HOSTID"] != old[1]["NCCL_HOSTID"]
    assert old[0]["NCCL_NET"] == "Socket"
    assert settings(0, (2, 30, 3))["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert "NCCL_HOSTID" not in settings(0, (2, 30, 3))
