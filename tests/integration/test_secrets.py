"""What a job opens, and what it leaves: no port of the orchestrator, nothing for other users, no secret where it does not belong."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from holdfast.memstore import shared_memory, store_folders
from tests.integration.stage import ENDLESS, Stage
from tests.waiting import wait_until

API_KEY = "pnu_thekeyofthisprefectthatnobodymaysee"
OWN = "a-secret-of-the-script-0123456789"


def listening(pid: int) -> set[str]:
    """Return the TCP addresses at which a process listens, as the kernel writes them; none for one that has ended meanwhile."""
    inodes, rows = set[str](), list[list[str]]()
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(str(link.readlink()))
        rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}


def commands(pids: Iterable[int] | None = None) -> dict[int, bytes]:
    """Return the command line of *pids*, or of every process on this machine, but for those that have ended meanwhile."""
    found = {}
    for pid in map(int, (path.name for path in Path("/proc").glob("[0-9]*"))) if pids is None else pids:
        with suppress(OSError):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes()
    return found


def holding(folder: Path, secret: str) -> set[str]:
    """Return the names of the files below *folder* in which *secret* stands."""
    return {path.name for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()}


def modes(*folders: Path) -> dict[str, int]:
    """Return the permission bits of what lies below *folders*, by path; what is taken away meanwhile has none."""
    found = {}
    for path in (path for one in folders for path in (one, *one.rglob("*"))):
        with suppress(OSError):
            found[str(path)] = stat.S_IMODE(path.lstat().st_mode)
    return found


def test_a_job_opens_no_port_of_the_orchestrator_and_shows_its_secrets_to_nobody(stage: Stage) -> None:
    """Looked at while it trains and once it has ended: sockets, command lines, modes, and every byte that it left."""
    history = f"sqlite:///{stage.home / 'history.db'}"
    stage.environment |= {"PREFECT_API_KEY": API_KEY, "HOLDFAST_HISTORY": history}
    play = stage.play("secretive", args=ENDLESS, nnodes=2, nproc_per_node=1, env={"SCRIPT_SECRET": OWN})
    play.steps_to(3)
    folder = stage.home / "jobs" / "secretive"
    token = (folder / "token").read_text().split()[1]
    workers = set(play.pids().values())
    given = b"".join(Path(f"/proc/{pid}/environ").read_bytes() for pid in workers)
    assert token.encode() in given  # it is in use
    assert not [one for one in (API_KEY, history) if one.encode() in given], "what is the orchestrator's alone reached the workers"
    assert listening(play.process.pid) == set()
    ours = commands(stage.left())
    memory = {where for pid, words in ours.items() if b"holdfast.agent.memstore.server" in words for where in listening(pid)}
    assert {where for pid, words in ours.items() if b"holdfast.agent" in words for where in listening(pid)} <= memory
    assert not [words for words in commands().values() for secret in (token, API_KEY, OWN) if secret.encode() in words]
    held = [one for one in map(stage.nodes.folder, stage.nodes.names()) if (one / "agent.sock").exists()]
    assert len(held) >= 2
    found = modes(*held)
    assert all(found[str(one)] == 0o700 for one in held)
    assert {mode for path, mode in found.items() if path.endswith(("agent.sock", "event-log.jsonl", "agent.json"))} == {0o600}
    places = [place for place in store_folders.root().iterdir() if place.is_dir()]
    assert {stat.S_IMODE(one.stat().st_mode) for one in (store_folders.root(), *places)} == {0o700}
    assert {mode for path, mode in modes(*places).items() if path.endswith(shared_memory.SUFFIX)} <= {0o600}
    play.stops()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600
    assert stat.S_IMODE((stage.home / "history.db").stat().st_mode) == 0o600
    wait_until(lambda: not stage.left(), seconds=60)
    assert holding(stage.home, token) == {"token"}
    assert holding(stage.home, API_KEY) == set()
    assert holding(stage.home, OWN) <= {"spec.json", "history.db", "history.db-wal", "secretive.json"}
