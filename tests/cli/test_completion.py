"""Shell completion: a real bash loads the script and completes commands, options, and names from the history."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT, Command, environment
from tests.cli.terminal import Terminal
from tests.cli.written_history import Author
from tests.waiting import wait_until

COMPLETE = """
eval "$(holdfast admin completion bash)"
COMP_WORDS=({words})
COMP_CWORD={place}
_holdfast_completion holdfast
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
Completions = Callable[..., list[str]]
SECONDS = 60
"""For a busy machine."""

HOLDFAST = f"""#!/bin/sh
exec {sys.executable} -m holdfast "$@"
"""


@pytest.fixture
def path(tmp_path: Path, holdfast_home: Path) -> str:
    """Return a PATH on which `holdfast` is."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "holdfast"
    program.write_text(HOLDFAST)
    program.chmod(0o755)
    return f"{program.parent}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture
def completions(tmp_path: Path, path: str) -> Completions:
    """Return what bash completes after the given words."""

    def complete(*words: str, **more: str) -> list[str]:
        script = COMPLETE.format(words=" ".join(f"'{word}'" for word in ("holdfast", *words)), place=len(words))
        env = environment(**more) | {"PATH": path}
        done = subprocess.run(["bash", "--norc", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout.split()

    return complete


def test_bash_completes_commands_and_options(completions: Completions) -> None:
    """The script that `admin completion bash` prints is loaded by a real bash."""
    assert completions("st") == ["stop", "status"]
    assert completions("node", "dec") == ["decommission"]
    assert completions("logs", "--fol") == ["--follow"]


def test_bash_completes_jobs_nodes_and_incidents(completions: Completions, running: Author, tmp_path: Path) -> None:
    """From the history, and from the cluster file."""
    assert completions("status", "gpt") == ["gpt-small"]
    assert completions("incidents", "show", "") == ["1", "2", "3"]
    assert completions("incidents", "sh") == ["show"]
    assert completions("incidents", "gpt") == ["gpt-small"]
    assert completions("incidents", "") == ["ls", "show", "gpt-small"]
    assert completions("incidents", "--js") == ["--json"]
    assert completions("incidents", "gpt-small", "--js") == ["--json"]
    (tmp_path / "cluster.yaml").write_text("name: small\nnodes: 3\n")
    assert completions("node", "cordon", "--cluster", "cluster.yaml", "node-") == ["node-0", "node-1", "node-2"]
    assert completions("node", "drain", "", HOLDFAST_CLUSTER="cluster.yaml") == ["node-0", "node-1", "node-2"]


def test_bash_completes_fault_kinds_and_policies(completions: Completions) -> None:
    """From the catalogue."""
    assert completions("faults", "show", "gpu-off") == ["gpu-off-bus"]
    assert completions("policy", "show", "pat") == ["patient"]


LINES = {"holdfast st": {"stop", "status"}, "holdfast node dec": {"decommission"}, "holdfast status gpt": {"gpt-small"}}


@pytest.mark.parametrize("line", LINES)
def test_fish_completes(line: str, path: str, running: Author, tmp_path: Path) -> None:
    """A real fish loads the script, and is asked as its own completion asks."""
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed: scripts/system_packages.sh installs it")
    script = f"holdfast admin completion fish | source; complete --do-complete '{line}'"
    env = environment() | {"PATH": path, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
    done = subprocess.run(["fish", "--no-config", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert {one.partition("\t")[0] for one in done.stdout.splitlines()} == LINES[line], done.stderr


@pytest.mark.parametrize("line", LINES)
def test_zsh_completes(line: str, path: str, running: Author, tmp_path: Path) -> None:
    """A real zsh on a terminal loads the script; the tab key completes the line, or lists what fits."""
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed: scripts/system_packages.sh installs it")
    setup = "PS1='ready> '; autoload -U compinit; compinit -u -D; eval \"$(holdfast admin completion zsh)\"\n"
    (tmp_path / ".zshrc").write_text(setup)
    with Terminal(["zsh", "-d", "-i"], environment() | {"PATH": path, "HOME": str(tmp_path), "ZDOTDIR": str(tmp_path)}) as terminal:
        wait_until(lambda: "ready> " in terminal.text, seconds=SECONDS, explain=lambda: terminal.text)
        terminal.type(f"{line}\t\t")
        wait_until(
            lambda: all(re.search(rf"\b{name}\b", terminal.text) for name in LINES[line]),
            seconds=SECONDS,
            explain=lambda: repr(terminal.raw),
        )


def test_a_damaged_history_or_cluster_completes_nothing(completions: Completions, holdfast_home: Path, tmp_path: Path) -> None:
    """A shell shows no errors, and nothing is created."""
    (holdfast_home / "history.db").write_bytes(b"no database" * 1000)
    assert completions("status", "") == []
    (tmp_path / "bad.yaml").write_text("kind: [")
    assert completions("node", "cordon", "--cluster", "bad.yaml", "") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_printed_for_each_shell(shell: str, here: Command) -> None:
    """It requests completions by the variable that the program reads."""
    done = here("admin", "completion", shell)
    assert done.returncode == 0
    assert f"_HOLDFAST_COMPLETE={shell}_complete" in done.stdout


@pytest.mark.parametrize("words", ["holdfast status ", "holdfast node cordon "])
def test_a_completion_loads_neither_torch_nor_prefect_nor_migrations(words: str, running: Author) -> None:
    """It answers while a person waits for it."""
    code = (
        "import atexit, sys, json; atexit.register(lambda: print(json.dumps(list(sys.modules)), file=sys.stderr));"
        "from holdfast.cli import main; main([])"
    )
    count = str(len(words.split()))
    env = environment(COMP_WORDS=words, COMP_CWORD=count, _HOLDFAST_COMPLETE="bash_complete")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert "plain," in done.stdout
    loaded = {name.partition(".")[0] for name in json.loads(done.stderr.splitlines()[-1])}
    assert not loaded & {"torch", "prefect", "alembic", "sqlalchemy", "sqlmodel", "matplotlib"}
