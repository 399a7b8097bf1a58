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
from contextlib import closing
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from holdfast.history import History, queries
from holdfast.leftovers import leftovers
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
SECONDS = 120
SCRIPT = """
import os, pathlib, time
pathlib.Path("environ").write_bytes(b"\\0".join(k.encode() + b"=" + v.encode() for k, v in os.environ.items()))
while not pathlib.Path("enough").exists():
    time.sleep(0.02)
"""


def asked(url: str, pair: str | None = None, body: object = None) -> Any:
    """Return what the server at *url* answers to who shows *pair*; the status when it is another than 200."""
    proof = {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"} if pair else {}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json", **proof})  # noqa: S310 (our own address)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def listened(url: str, pair: str | None) -> str:
    """Return how the server answers to who wants to hear all events and shows *pair*."""
    with connect(f"{url.replace('http', 'ws', 1)}/events/out", subprotocols=[Subprotocol("prefect")]) as line:
        line.send(json.dumps({"type": "auth", "token": pair}))
        try:
            return str(json.loads(line.recv(timeout=30))["type"])
        except ConnectionClosed as error:
            return str(error.rcvd.reason if error.rcvd else "closed")


def test_a_server_of_our_own_is_its_users_alone(tmp_path: Path, holdfast_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flow, tasks, events and artifacts go through it as ever; who has not the password learns nothing, also not from its files."""
    prefect = tmp_path / "prefect"
    prefect.mkdir(mode=0o755)
    (prefect / "prefect.db").touch(0o644)  # as an earlier version left it
    (tmp_path / "nap.py").write_text(SCRIPT)
    (tmp_path / "job.yaml").write_text("name: nap\nscript: nap.py\ncluster: {nodes: 1}\n")
    given = {"HOLDFAST_HOME": str(holdfast_home), "PREFECT_HOME": str(prefect), "PYTHONPATH": str(ROOT), "DO_NOT_TRACK": "1"}
    bare = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    log = holdfast_home / "jobs" / "nap" / "flow.log"
    monkeypatch.setenv("HOLDFAST_HOME", str(holdfast_home))
    before = os.umask(0o022)
    try:
        command = subprocess.Popen([sys.executable, "-m", "holdfast", "run", "job.yaml"], cwd=tmp_path, env=bare | given)
    finally:
        os.umask(before)
    try:
        said = wait_until(
            lambda: re.search(r"Prefect UI while this job runs: (\S+)/runs \(.* in (\S+)\)", log.read_text() if log.exists() else ""),
            seconds=SECONDS,
        )
        address, password = said[1], Path(said[2])
        pair, api = password.read_text().strip(), f"{address}/api"

        # Everything of the job comes to be there, for who has the password.
        wait_until(lambda: _state() == "RUNNING", seconds=SECONDS, explain=log.read_text)
        (run,) = wait_until(lambda: asked(f"{api}/flow_runs/filter", pair, {}), seconds=SECONDS)
        assert run["state_name"] == "Running"
        wait_until(lambda: asked(f"{api}/task_runs/filter", pair, {}), seconds=SECONDS, explain=log.read_text)
        wait_until(lambda: "nap" in {one["key"] for one in asked(f"{api}/artifacts/filter", pair, {})}, seconds=SECONDS, explain=log.read_text)
        wait_until(lambda: any(name.startswith("holdfast.") for name in _events(api, pair)), seconds=SECONDS, explain=log.read_text)
        assert listened(api, pair) == "auth_success"

        # And for nobody else.
        assert asked(f"{address}/ui-settings")["auth"] == "BASIC"
        for wrong in (None, "holdfast:", f"{pair}x"):
            for place in ("flow_runs", "block_documents", "artifacts", "events"):
                assert asked(f"{api}/{place}/filter", wrong, {}) == HTTPStatus.UNAUTHORIZED
            assert asked(f"{api}/flow_runs/{run['id']}/set_state", wrong, {"state": {"type": "CANCELLED"}}) == HTTPStatus.UNAUTHORIZED
            assert listened(api, wrong) != "auth_success"
        readable = [path for path in prefect.rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
        assert (readable, password.stat().st_mode & 0o777) == ([], 0o600)
        secret = pair.partition(":")[2].encode()
        assert secret not in (tmp_path / "environ").read_bytes()
        assert secret not in b"".join(_commands())
        assert secret.decode() not in log.read_text() + (prefect / "holdfast-server.log").read_text()
    finally:
        (tmp_path / "enough").touch()
        assert command.wait(SECONDS) == 0
    wait_until(lambda: not leftovers(holdfast_home), seconds=SECONDS)
    assert password.read_text().strip() == pair


def _state() -> str:
    with closing(History.open(create=False)) as history:
        found = queries.jobs(history, "nap", limit=1)
        move = queries.state_of(history, found[0].id) if found else None
        return move.after if move else ""


def _events(api: str, pair: str) -> list[str]:
    return [one["event"] for one in asked(f"{api}/events/filter", pair, {"limit": 50})["events"]]


def _commands() -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:
            continue
    return found
