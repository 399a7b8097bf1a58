"""Where nobody watches, a test that is skipped for anything but hardware fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mentions import mentions

ROOT = Path(__file__).parent.parent
TESTS = """
import pytest

@pytest.mark.skipif(True, reason="no NVIDIA GPU here")
def test_hardware(): pass

@pytest.mark.skipif(True, reason="needs sshd (openssh-server)")
def test_server(): pass

@pytest.fixture
def server(): pytest.skip("needs Chromium on the PATH")

def test_fixture(server): pass

def test_ours(): pytest.importorskip("holdfast.that_is_gone", exc_type=ImportError)

@pytest.mark.xfail(strict=True)
def test_expected(): raise ValueError
"""
MODULE = 'import pytest\npytest.importorskip("holdfast.that_is_gone", exc_type=ImportError)\ndef test_nothing(): pass\n'


def outcome(folder: Path, ci: str | None) -> tuple[int, str]:
    """Run the tests in *folder* with our plugin; return the exit status and what was said."""
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | {"PYTHONPATH": str(ROOT)}
    environment |= {} if ci is None else {"CI": ci}
    command = [sys.executable, "-m", "pytest", "-p", "tests.skips", "-p", "no:cacheprovider", "-c", os.devnull, "-ra", str(folder)]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("ci", ["true", "1"])
def test_a_skip_for_anything_but_hardware_fails_in_ci(tmp_path: Path, ci: str) -> None:
    """Of a test, of a fixture, of what cannot be imported, of a whole module; what was expected to fail is no skip."""
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_module.py").write_text(MODULE)
    status, output = outcome(tmp_path, ci)
    assert status != 0
    assert "errors" in output.lower() or "error" in output.lower()
    (tmp_path / "test_module.py").unlink()
    status, output = outcome(tmp_path, ci)
    assert (status, "1 failed, 1 skipped, 1 xfailed, 2 errors" in output) == (1, True), output
    for name in ("test_server", "test_ours", "test_fixture"):
        assert f"test_some.py::{name}" in output.partition("short test summary")[2]
    assert mentions(output, "CI", "sshd (openssh-server)")


@pytest.mark.parametrize("ci", [None, ""])
def test_a_person_may_lack_what_a_test_needs(tmp_path: Path, ci: str | None) -> None:
    """Every skip is printed with its reason."""
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_module.py").write_text(MODULE)
    status, output = outcome(tmp_path, ci)
    assert (status, "5 skipped, 1 xfailed" in output) == (0, True), output


def test_this_suite_has_the_rule() -> None:
    """It is entered in what all tests share."""
    from tests import conftest, skips  # noqa: PLC0415

    for hook in ("pytest_runtest_makereport", "pytest_make_collect_report"):
        assert getattr(conftest, hook) is getattr(skips, hook)
