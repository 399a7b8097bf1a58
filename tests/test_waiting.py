"""The helpers of the tests themselves: they must fail when they should."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.testing.orphans import leftovers
from tests.waiting import wait_until


def test_waiting_in_vain_fails_with_the_explanation() -> None:
    """The reader of a failed test learns what was waited for."""
    with pytest.raises(AssertionError, match="the child's log"):
        wait_until(lambda: None, seconds=0, explain=lambda: "the child's log")


def test_waiting_gives_the_first_true_answer() -> None:
    """The answer itself is handed on."""
    answers = iter(["", "", "found"])
    assert wait_until(lambda: next(answers), seconds=60) == "found"


def test_a_process_left_behind_is_seen(tmp_path: Path) -> None:
    """A child that names the folder in a variable of ours is listed while it lives, one that names another is not."""
    nap = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    for environment, seen in (
        ({"HOLDFAST_HOME": str(tmp_path / "home")}, True),
        ({"A": "b", "HOLDFAST_NODE_MARK": str(tmp_path)}, True),
        ({"HOLDFAST_HOME": f"{tmp_path}-other"}, False),
    ):
        with subprocess.Popen(nap, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout
            child.stdout.readline()  # it runs
            assert bool([line for line in leftovers(tmp_path) if line.startswith(f"{child.pid} ")]) is seen
            child.kill()
        assert not leftovers(tmp_path)


AGAIN = """
import os, signal, sys
from tests.reaping import Children
from tests.waiting import wait_until

def child(code):
    return os.posix_spawn(sys.executable, [sys.executable, "-c", "import sys; " + code], os.environ)

children = Children()
first = child("sys.exit(7)")
children.begun(first)
wait_until(lambda: children.ended() == {str(first): 7}, seconds=60)
for _ in range(1000):  # others on this machine may be given the number first
    with open("/proc/sys/kernel/ns_last_pid", "w") as file:
        file.write(str(first - 1))
    again = child("import signal; signal.pause()")
    children.begun(again)
    if again == first:
        break
    os.kill(again, signal.SIGKILL)
lives = str(first) not in children.ended()
os.kill(again, signal.SIGKILL)
assert (again, lives) == (first, True)
wait_until(lambda: children.ended().get(str(first)) == -signal.SIGKILL, seconds=60)
"""


@pytest.mark.skipif(not os.access("/proc/sys/kernel/ns_last_pid", os.W_OK), reason="the kernel lets nobody here choose a process's number")
def test_a_child_with_the_number_of_an_earlier_one_lives() -> None:
    """Numbers of processes come again in a long run: what the earlier one ended with is not taken for the end of the later."""
    done = subprocess.run([sys.executable, "-c", AGAIN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
