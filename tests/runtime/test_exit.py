"""How a process ends that an exception ends, while what it has left waits for a device, or aborts the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mentions import mentions

ROOT = Path(__file__).parents[2]
LEAVES = """
import ctypes, json, os
from holdfast.runtime.process import exit
class Group:
    def __del__(self, act=ACT): act()
exit.FINALIZER_SECONDS = 0.2
"""
"""A script with an object like a process group, which acts when it is taken apart."""
ABORTS = LEAVES.replace("ACT", "os.abort") + "json.kept = Group()\n"
"""It belongs to a library: the interpreter takes it apart at the end."""
HANGS = LEAVES.replace("ACT", "ctypes.PyDLL(None).pause") + "kept = Group()\n"
"""It belongs to the script, and hangs with the interpreter's lock, as a destructor in C++ does that waits for a device."""
FAILS = """
def fails(): raise ValueError("of the script")
fails()
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    """Run *script* by an interpreter that nobody has prepared."""
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.parametrize("certain", [True, False])
def test_a_script_that_raises_ends_with_status_1_whatever_its_groups_would_do(certain: bool) -> None:  # noqa: FBT001 (with and without)
    """Without Holdfast's part the abort of a destructor hides the status. The traceback is there either way, once."""
    ended = run(f"{ABORTS}\n{'exit.make_failure_certain()' if certain else ''}\n{FAILS}")
    assert ended.returncode == (1 if certain else -6)
    assert ended.stderr.count("ValueError: of the script") == 1
    assert mentions(ended.stderr, "Traceback", "fails")


def test_a_destructor_that_never_ends_does_not_hold_a_failed_script() -> None:
    """Its stack is shown, after the exception."""
    ended = run(f"{HANGS}\nexit.make_failure_certain()\nprint('said')\n{FAILS}")
    assert ended.returncode == 1
    assert ended.stdout == "said\n"
    before, _, after = ended.stderr.partition("ValueError: of the script")
    assert mentions(before, "Traceback", "fails")
    assert mentions(after, "Timeout", "__del__")


def test_a_script_that_ends_otherwise_exits_as_ever() -> None:
    """Of a status that it has chosen nothing is known here, and a clean end takes all apart."""
    prepared = "from holdfast.runtime.process import exit\nexit.make_failure_certain()\nimport json, sys\n"
    assert [run(prepared + how).returncode for how in ("sys.exit(3)", "pass")] == [3, 0]
    kept = "class Kept:\n    def __del__(self, show=print): show('gone', flush=True)\njson.kept = Kept()\n"
    assert run(prepared + kept).stdout == "gone\n"


def test_exit_handlers_run_once_and_in_their_order_when_a_script_fails() -> None:
    """Also those of what was imported before there were managed groups, such as an experiment tracker's."""
    registered = "import atexit\nfrom holdfast.runtime.process import exit\natexit.register(print, 'first')\nexit.make_failure_certain()\n"
    ended = run(f"{registered}atexit.register(print, 'second')\nraise ValueError('of the script')")
    assert ended.returncode == 1
    assert ended.stdout == "second\nfirst\n"


def test_an_exception_that_a_script_only_prints_does_not_fail_it() -> None:
    """By the interpreter's own function for that."""
    prepared = "import sys\nfrom holdfast.runtime.process import exit\nexit.make_failure_certain()\n"
    ended = run(f"{prepared}try:\n    1 / 0\nexcept ZeroDivisionError:\n    sys.excepthook(*sys.exc_info())\nprint('goes on')")
    assert ended.returncode == 0
    assert mentions(ended.stderr, "ZeroDivisionError")
    assert ended.stdout == "goes on\n"
