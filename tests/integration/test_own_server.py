"""The Prefect server that `holdfast run` brings where none is named: its port is every local user's to reach, what it knows is not."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import closing, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from holdfast.history import History, queries
from holdfast.testing.orphans import leftovers
from tests.waiting import wait_until

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SECONDS = 120
SCRIPT = """
import os, pathlib, time
pathlib.Path("environ").write_bytes(b"\\0".join(k.encode() + b"=" + v.encode() for k, v in os.environ.items()))
while not pathlib.Path("enough").exists():
    time.sleep(0.02)
"""


class Job:
    """A job that naps, run by a command that knows no Prefect server."""

    def __init__(self, place: Path, home: Path) -> None:
        self.place, self.home, self.prefect = place, home, place / "prefect"
        self.prefect.mkdir(mode=0o755)
        (self.prefect / "prefect.db").touch(0o644)  # as an earlier version left it
        (place / "nap.py").write_text(SCRIPT)
        (place / "job.yaml").write_text("name: nap\nscript: nap.py\ncluster: {nodes: 1}\n")
        given = {"HOLDFAST_HOME": str(home), "PREFECT_HOME": str(self.prefect), "PYTHONPATH": str(ROOT), "DO_NOT_TRACK": "1"}
        bare = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        command = [sys.executable, "-m", "holdfast", "run", "job.yaml"]
        self.command = subprocess.Popen(command, cwd=place, env=bare | given, umask=0o022)

    def log(self) -> str:
        """Return the flow's log."""
        path = self.home / "jobs" / "nap" / "flow.log"
        return path.read_text() if path.exists() else ""

    def server(self) -> Server:
        """Return the server, once the log names it."""
        said: re.Match[str] | None = wait_until(
            lambda: re.search(r"Prefect UI while this job runs: (\S+)/runs \(.* in (\S+)\)", self.log()), seconds=SECONDS, explain=self.log
        )
        assert said is not None
        return Server(said[1], Path(said[2]))

    def state(self) -> str:
        """Return the job's state, as the history has it."""
        with closing(History.open(create=False)) as history:
            found = queries.jobs(history, "nap", limit=1)
            move = queries.state_of(history, found[0].id) if found else None
            return move.after if move else ""

    def end(self) -> None:
        """Let the job end, and see that it ended well."""
        (self.place / "enough").touch()
        assert self.command.wait(SECONDS) == 0, self.log()
        wait_until(lambda: not leftovers(self.home), seconds=SECONDS)


@dataclass
class Server:
    """Where the server listens, and the file with its password."""

    address: str
    password: Path

    def __post_init__(self) -> None:
        self.pair = self.password.read_text().strip()

    def asked(self, path: str, pair: str | None, body: object = None) -> Any:
        """Return what it answers to who shows *pair*; the status when it is another than 200."""
        proof = {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"} if pair else {}
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **proof}
        request = urllib.request.Request(f"{self.address}/{path}", data=data, headers=headers)  # noqa: S310 (our own address)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    def found(self, what: str) -> list[dict[str, Any]]:
        """Return all of a kind that there is, for who has the password."""
        answer = self.asked(f"api/{what}/filter", self.pair, {})
        return list(answer["events"] if what == "events" else answer)

    def listened(self, pair: str | None) -> str:
        """Return how it answers to who wants to receive all events and shows *pair*."""
        url = f"{self.address.replace('http', 'ws', 1)}/api/events/out"
        with connect(url, subprotocols=[Subprotocol("prefect")]) as line:
            line.send(json.dumps({"type": "auth", "token": pair}))
            try:
                return str(json.loads(line.recv(timeout=30))["type"])
            except ConnectionClosed as error:
                return str(error.rcvd.reason if error.rcvd else "closed")


def test_a_server_of_our_own_is_its_users_alone(tmp_path: Path, holdfast_home: Path) -> None:
    """Flow, tasks, events and artifacts go through it as ever; who has not the password learns nothing, also not from its files."""
    job = Job(tmp_path, holdfast_home)
    try:
        server = job.server()
        wait_until(lambda: job.state() == "RUNNING", seconds=SECONDS, explain=job.log)
        for what, of_it in (("flow_runs", "name"), ("task_runs", "name"), ("artifacts", "key"), ("events", "event")):
            wanted = {"artifacts": "nap", "events": "holdfast."}.get(what, "")
            wait_until(lambda what=what, of_it=of_it, wanted=wanted: _has(server, what, of_it, wanted), seconds=SECONDS, explain=job.log)  # type: ignore[misc]
        assert server.listened(server.pair) == "auth_success"
        assert server.asked("ui-settings", None)["auth"] == "BASIC"
        (run,) = server.found("flow_runs")
        for wrong in (None, "holdfast:", f"{server.pair}x"):
            for what in ("flow_runs", "block_documents", "artifacts", "events"):
                assert server.asked(f"api/{what}/filter", wrong, {}) == HTTPStatus.UNAUTHORIZED
            assert server.asked(f"api/flow_runs/{run['id']}/set_state", wrong, {"state": {"type": "CANCELLED"}}) == HTTPStatus.UNAUTHORIZED
            assert server.listened(wrong) != "auth_success"
        assert [path for path in job.prefect.rglob("*") if path.is_file() and path.stat().st_mode & 0o077] == []
        secret = server.pair.partition(":")[2]
        assert secret not in (tmp_path / "environ").read_text() + job.log() + (job.prefect / "holdfast-server.log").read_text()
        assert secret not in _commands()
    finally:
        job.end()
    assert server.password.read_text().strip() == server.pair


def _has(server: Server, what: str, of_it: str, wanted: str) -> bool:
    return any(str(one[of_it]).startswith(wanted) for one in server.found(what))


def _commands() -> str:
    """Return the command lines of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_bytes().decode(errors="replace"))
    return "\n".join(found)
