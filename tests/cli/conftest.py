"""The command line as its users meet it: a process with a status, an output and an error output."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from holdfast.cli import main
from holdfast.errors import OperatorError
from holdfast.exit_codes import OPERATOR_ERROR
from holdfast.history.store import History
from tests.cli.written_history import Author, a_running_job
from tests.fresh_history import fresh_history
from tests.ssh.conftest import Site
from tests.ssh.sshd import PROGRAM as SSHD

ROOT = Path(__file__).parent.parent.parent
PROGRAM = (sys.executable, "-m", "holdfast")

Done = subprocess.CompletedProcess[str]
Command = Callable[..., Done]


def environment(**more: str) -> dict[str, str]:
    """Return our environment with the checkout importable."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


@pytest.fixture
def holdfast(holdfast_home: Path, tmp_path: Path) -> Command:
    """Run `holdfast` with arguments in a folder of its own; no traceback may ever show."""

    def run(*arguments: str, **more: str) -> Done:
        command = [*PROGRAM, *arguments]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment(**more),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
            timeout=60,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run


@pytest.fixture
def here(holdfast_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Do the same as `holdfast` without a process, for all that is about a text, a file or an exit code.

    What needs signals, pipes, a terminal, or a fresh interpreter uses `holdfast`. A traceback fails the test, as it is raised.
    """

    def run(*arguments: str, **more: str) -> Done:
        monkeypatch.chdir(tmp_path)
        for name, value in more.items():
            monkeypatch.setenv(name, value)
        capsys.readouterr()
        status = main(list(arguments))
        said = capsys.readouterr()
        return Done(arguments, status, said.out, said.err)

    return run


def refused(done: Done, error: OperatorError) -> bool:
    """Return whether a command was refused with *error*, and has written nothing else."""
    return (done.returncode, done.stdout, done.stderr) == (OPERATOR_ERROR, "", f"holdfast: {error}\n")


@pytest.fixture
def book(holdfast_home: Path) -> Iterator[History]:
    """Give the open history that the command line will read."""
    history = fresh_history(holdfast_home / "history.db")
    yield history
    history.close()


@pytest.fixture
def running(book: History) -> Author:
    """Give a job that runs, with three incidents behind it."""
    return a_running_job(book, "gpt-small", time.time() - 45)


@pytest.fixture
def site(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Give a site of real SSH servers."""
    if SSHD is None:
        pytest.skip("needs sshd (openssh-server)")
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    made = Site(tmp_path_factory.mktemp("site"))
    yield made
    made.close()


def described(site: Site, folder: Path, **more: object) -> str:
    """Write the file of the site's cluster; return its name."""
    fields = site.cluster(**more).model_dump(mode="json", exclude_defaults=True) | {"kind": "ssh"}
    (folder / "cluster.yaml").write_text(yaml.safe_dump(fields))
    return "cluster.yaml"
