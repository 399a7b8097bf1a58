"""`make gpu` without a card: it says what is missing, and the table that it prints on one is made from pytest's own report."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.__main__ import ROOT, outcomes, table
from tests.gpu.one_card import settings
from tests.mentions import mentions

CASES = """
import pytest
def test_good(): pass
def test_bad(): assert 1 == 2, "the weights differ"
@pytest.mark.skip(reason="needs an NVIDIA GPU of another kind")
def test_other(): pass
"""


def test_the_table_says_what_passed_failed_and_was_skipped(tmp_path: Path) -> None:
    """With the reason, and the card and versions above."""
    (tmp_path / "test_cases.py").write_text(CASES)
    report = tmp_path / "results.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={report}", "test_cases.py"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, timeout=100)
    found = outcomes(report)
    assert [(one.name, one.outcome) for one in found] == [
        ("test_cases: test_good", "passed"),
        ("test_cases: test_bad", "failed"),
        ("test_cases: test_other", "skipped"),
    ]
    text = table(found, {"card": "H100", "driver": "580.1", "torch": "2.13.0", "NCCL": "2.29.7"})
    assert mentions(text, "card H100", "the weights differ", "another kind", "1 passed, 1 failed, 1 skipped")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said without a GPU")
def test_without_a_card_one_sentence_says_what_is_missing() -> None:
    """Status 0: a machine without a GPU fails nothing."""
    ended = subprocess.run([sys.executable, "-m", "tests.gpu"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("\n") == 1
    assert mentions(ended.stdout, "nothing was run", "torch")


def test_ranks_that_share_a_card_look_like_different_hosts_or_say_so() -> None:
    """By the version of NCCL."""
    old = [settings(rank, (2, 29, 7)) for rank in range(2)]
    assert old[0]["NCCL_HOSTID"] != old[1]["NCCL_HOSTID"]
    assert old[0]["NCCL_NET"] == "Socket"
    assert settings(0, (2, 30, 3))["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert "NCCL_HOSTID" not in settings(0, (2, 30, 3))
