"""What leaves the house in a support bundle: all that helps, and no secret, whatever is broken."""

from __future__ import annotations

import json
import os
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
from sqlmodel import SQLModel

from holdfast.cluster.interface import Logs, NodeBackend
from holdfast.cluster.remote import RemoteNodes
from holdfast.history.models import FaultRecord, JobEvent, Lease
from holdfast.history.store import History
from holdfast.support.archive import TAIL, Bundle
from holdfast.support.redactor import Redactor
from holdfast.support.remote_logs import AHEAD, MAX_BYTES, MAX_LOGS_PER_NODE, RemoteLogs, in_order
from tests.cli.conftest import Command
from tests.cli.written_history import Author
from tests.cluster.proxies import Boxes, ChildTransport

TOKEN = "0123456789abcdef0123456789abcdef"
SECRETS = {
    "token": TOKEN,
    "api key": "pnu_ABCDEFGHIJKLMNOPQRSTUVWX",
    "database": "hunter2-of-postgres",
    "quoted": "p@ss/w0rd!",
    "job": "wandb-aaaabbbbcccc",
    "argument": "argument-ddddeeee",
    "webhook": "T00000000/B00000000/XXXXXXXXXXXXXXXXXXXXXXXX",
    "apprise": "tokenA1/tokenB2/tokenC3",
    "bearer": "abcdefghijklmnop.qrstuv",
    "github": "ghp_abcdefghijklmnopqrstuvwxyz012345",
    "hub": "hf_abcdefghijklmnopqrstuvwxyz",
    "amazon": "AKIAABCDEFGHIJKLMNOP",
    "web token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N",
    "key": "MIIEpAIBAAKCAQEAnotakeyatall",
    "query": "sig-qqqqwwwweeee",
    "plain": "correct-horse-battery",
    "outbox": "5f" * 32,
}
SAID = f"""\
connecting to postgresql://user:{SECRETS["database"]}@db.example.org/holdfast
again as postgresql://user:p%40ss%2Fw0rd%21@db.example.org/holdfast
POST https://hooks.example.org/services/{SECRETS["webhook"]}
notify slack://{SECRETS["apprise"]}
Authorization: Bearer {SECRETS["bearer"]}
cloning with {SECRETS["github"]} and {SECRETS["hub"]} and {SECRETS["amazon"]}
cookie {SECRETS["web token"]}
-----BEGIN RSA PRIVATE KEY-----
{SECRETS["key"]}
-----END RSA PRIVATE KEY-----
GET https://bucket.example.org/data?X-Amz-Signature={SECRETS["query"]}&part=1
{{"password": "{SECRETS["plain"]}"}}
HOLDFAST_TOKEN={TOKEN}
started with --api-token {SECRETS["argument"]} and {SECRETS["job"]}
step 17 took 0.25 s on node-1
"""


def plant(home: Path, book: History, author: Author, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put secrets wherever some could come to lie."""
    monkeypatch.setenv("PREFECT_API_KEY", SECRETS["api key"])
    monkeypatch.setenv("PWD", str(home))
    monkeypatch.setenv("PREFECT_API_URL", f"https://someone:{SECRETS['database']}@prefect.example.org/api")
    folder = home / "jobs" / "gpt-small"
    node = home / "clusters" / "local" / "node-1"
    for one in (folder / "logs", node):
        one.mkdir(parents=True)
    (folder / "token").write_text(f"{author.job.id} {TOKEN}")
    spec = {
        "name": "gpt-small",
        "args": ["--api-token", SECRETS["argument"], "--lr", "0.1"],
        "env": {"WANDB": SECRETS["job"], "NCCL_DEBUG": "INFO", "WANDB_OFFLINE": "false", "DATA": str(home)},
    }
    (folder / "spec.json").write_text(json.dumps({"job": spec, "cluster": {"kind": "local"}}))
    for path in (folder / "flow.log", folder / "logs" / "rank-0.log", node / "agent.log", folder / "history.outbox.jsonl.refused"):
        path.write_text(SAID)
    (node / "event-log.jsonl").write_text(json.dumps({"seq": 1, "event": "worker.raised", "raised": {"traceback": SAID}}) + "\n")
    (node / "link.log").symlink_to("/etc/passwd")
    os.mkfifo(node / "pipe.log")
    remark = JobEvent(job_id=author.job.id, at=1.0, text=SAID)
    evidence = {"quote": SAID, "webhook": "https://example.org/" + SECRETS["webhook"], "password": SECRETS["plain"]}
    fault = FaultRecord(
        job_id=author.job.id, at=1.0, kind="x", recommended_action="record", target="", attributed_to="", generation=1, evidence=evidence
    )
    rows: list[SQLModel] = [remark, fault]
    with book.session() as session:
        session.add_all(rows)
        lease = Lease(job_id=author.job.id, epoch=1, holder="a flow", host="far", pid=1, pid_started=0.0, expires_at=0.0)
        session.merge(Lease(**{**lease.model_dump(), "outbox_key": SECRETS["outbox"]}))
        job = author.job
        job.spec = spec
        session.merge(job)


def contents(path: Path) -> dict[str, str]:
    """Return the texts in a bundle by their names."""
    with tarfile.open(path) as tar:
        return {one.name.partition("/")[2]: (tar.extractfile(one) or pytest.fail(one.name)).read().decode() for one in tar.getmembers()}


def leaks(texts: dict[str, str]) -> list[tuple[str, str]]:
    """Return which secret is in which file."""
    return [(name, which) for name, text in texts.items() for which, secret in SECRETS.items() if secret in text]


def test_a_bundle_has_what_helps_and_no_secret(  # noqa: PLR0917 (fixtures)
    here: Command, holdfast_home: Path, book: History, running: Author, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Planted in the environment, the job's description, logs, journals and the history."""
    plant(holdfast_home, book, running, monkeypatch)
    assert all(secret in SAID or which in {"api key", "quoted", "outbox"} for which, secret in SECRETS.items())
    done = here("admin", "support-bundle", "gpt-small", "-o", "b.tar.gz", "--json")
    output = json.loads(done.stdout)
    assert output["missing"] == []
    assert (tmp_path / "b.tar.gz").stat().st_mode & 0o777 == 0o600
    texts = contents(tmp_path / "b.tar.gz")
    assert leaks(texts) == []
    for name in (
        "README.txt",
        "versions.json",
        "machine.json",
        "health.json",
        "job/flow.log",
        "job/logs/rank-0.log",
        "job/spec.json",
        "nodes/node-1/agent.log",
    ):
        assert texts[name], name
    assert "step 17 took 0.25 s on node-1" in texts["nodes/node-1/agent.log"]
    assert "postgresql://***@db.example.org/holdfast" in texts["job/flow.log"]
    spec = json.loads(texts["job/spec.json"])["job"]
    assert (spec["args"], spec["env"]) == (
        ["--api-token", "***", "--lr", "0.1"],
        dict.fromkeys(("DATA", "WANDB", "WANDB_OFFLINE"), "***") | {"NCCL_DEBUG": "INFO"},
    )
    assert f"home:     {holdfast_home}" in texts["README.txt"], "the folder that one is in, or data lie in, is no secret"
    roots = [json.loads(line)["root"] for line in texts["history/fault.jsonl"].splitlines()]
    assert set(roots) == {False, True}, "a word of a setting is not hidden everywhere"
    incidents = [json.loads(line) for line in texts["history/incident.jsonl"].splitlines()]
    assert {one["number"] for one in incidents} == {1, 2, 3}
    assert json.loads(texts["versions.json"])["protocol"] == 1
    assert "root:" not in "".join(texts.values())
    assert " token" in texts["job/files.txt"]


def test_logs_of_other_machines_are_in_it_once_and_without_their_secrets(  # noqa: PLR0917 (fixtures)
    here: Command, holdfast_home: Path, book: History, running: Author, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Read through real gates, of nodes that share one home; a machine that does not answer is named, and costs nothing else.

    The job was not started by `holdfast run` on this machine: its description is the history's.
    """
    plant(holdfast_home, book, running, monkeypatch)
    (holdfast_home / "jobs" / "gpt-small" / "spec.json").unlink()
    job, reach = running.job, ChildTransport()
    job.cluster = {"kind": "ssh", "name": "far", "hosts": ["n[0-3]"]}
    with book.session() as session:
        session.merge(job)
    boxes = Boxes(str(tmp_path / "hf"), names=["n0", "n1", "n2", "n3"])
    logs, node = tmp_path / "hf" / "jobs" / "gpt-small" / "logs", tmp_path / "hf" / "nodes" / "n0"
    for folder in (logs, node):
        folder.mkdir(parents=True)
    (logs / "rank-0.log").write_text("x" * 2 * TAIL + SAID)
    for name in ("rank-2.log", "rank-9.log", "hot-spare-0.log"):
        (logs / name).write_text(SAID)
    (node / "agent.log").write_text(SAID)
    monkeypatch.setattr("holdfast.support.bundle.open_cluster", lambda _cluster: RemoteNodes(boxes, reach))
    done = here("admin", "support-bundle", "gpt-small", "-o", "b.tar.gz", "--json")
    texts = contents(tmp_path / "b.tar.gz")
    assert leaks(texts) == []
    described = json.loads(texts["job/spec.json"])
    assert (described["job"]["name"], described["job"]["env"]["NCCL_DEBUG"]) == ("gpt-small", "INFO")
    assert described["cluster"]["hosts"] == ["n[0-3]"]
    found = {name.removeprefix("nodes/") for name in texts if name.startswith("nodes/n")}
    assert found == {"n0/rank-0.log", "n0/agent.log", "n2/rank-2.log", "n0/rank-9.log", "n0/hot-spare-0.log"} | {
        name.removeprefix("nodes/") for name in texts if name.startswith("nodes/node-1/")
    }
    assert all("step 17 took 0.25 s on node-1" in texts[f"nodes/{name}"] for name in found if "files.txt" not in name)
    assert max(len(texts[f"nodes/{name}"]) for name in found) <= TAIL
    (missing,) = json.loads(done.stdout)["missing"]
    assert missing.startswith("nodes/n2/agent.log, nodes/n1/agent.log: "), "n3 never held a rank: no agent need have been there"
    reach.reap()
    reach.down = True
    done = here("admin", "support-bundle", "gpt-small", "-o", "c.tar.gz", "--json")
    away = ", ".join(f"nodes/n{number}/logs" for number in (0, 2, 1, 3))
    assert [one.partition(":")[0] for one in json.loads(done.stdout)["missing"]] == [away]
    assert "no route to host" in contents(tmp_path / "c.tar.gz")["README.txt"]


@pytest.mark.parametrize("name", ["nodes/n/../../../x", "/etc/x", "../x", "nodes//x", "nodes/n/..", "a\nb", "a\\..\\b", ""])
def test_no_path_in_a_bundle_escapes_it(tmp_path: Path, name: str) -> None:
    """Whoever helps unpacks it, with whatever tool."""
    path = tmp_path / "b.tar"
    with tarfile.open(path, "w") as tar:
        bundle = Bundle(tar, "top", Redactor())
        bundle.add(name, "planted")
        bundle.add("nodes/n/rank-0.log", "honest")
    with tarfile.open(path) as tar:
        assert tar.getnames() == ["top/nodes/n/rank-0.log"]
    assert "leads outside the bundle" in bundle.problems[0]


class Boastful:
    """Nodes of which one names more logs than anybody could take."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def names(self) -> list[str]:
        """Return the names of its nodes."""
        return ["boasts", "honest"]

    def logs(self, node: str, job: str) -> Logs:
        """Return what lies there."""
        return Logs(place=node, sizes={f"rank-{number}.log": 1 for number in range(10_000 if node == "boasts" else 1)})

    def log(self, node: str, job: str, name: str, at: int | None, most: int) -> bytes:
        """Return a log."""
        self.asked.append(most)
        return b"x"


def test_a_node_that_names_logs_without_end_costs_only_some_of_its_own(tmp_path: Path) -> None:
    """The bundle stays as small as it is to be, and what other nodes have is in it."""
    nodes = Boastful()
    with tarfile.open(tmp_path / "b.tar.gz", "w:gz", compresslevel=1) as tar:
        bundle = Bundle(tar, "top", Redactor())
        RemoteLogs(bundle, cast("NodeBackend", nodes), "j", {"boasts": [0], "honest": [0]}).run([], ())
    with tarfile.open(tmp_path / "b.tar.gz") as tar:
        assert {"top/nodes/honest/agent.log", "top/nodes/honest/rank-0.log", "top/nodes/boasts/agent.log"} <= set(tar.getnames())
    assert sum(nodes.asked) <= MAX_BYTES
    assert any(f"beyond the first {MAX_LOGS_PER_NODE}" in one for one in bundle.problems)


def test_only_so_many_logs_are_in_memory_as_are_soon_written() -> None:
    """Whatever their number; each has its request, in order."""
    begun: list[int] = []

    def act(number: int) -> int:
        begun.append(number)
        return number * number

    with ThreadPoolExecutor(4) as hands:
        ends = in_order(hands, act, range(10 * AHEAD))
        assert next(ends) == (0, 0)
        assert len(begun) <= AHEAD
        assert list(ends) == [(number, number**2) for number in range(1, 10 * AHEAD)]


@pytest.mark.parametrize("damage", ["history", "spec", "folder", "all"])
def test_it_works_where_much_is_broken(  # noqa: PLR0917 (fixtures)
    here: Command, holdfast_home: Path, book: History, running: Author, tmp_path: Path, damage: str
) -> None:
    """What is unavailable is listed, and the rest is there."""
    folder = holdfast_home / "jobs" / "gpt-small"
    folder.mkdir(parents=True)
    (folder / "flow.log").write_bytes(b"\xff\xfe half a line")
    book.close()
    if damage in {"history", "all"}:
        (holdfast_home / "history.db").write_bytes(b"no database" * 1000)
        for beside in holdfast_home.glob("history.db-*"):
            beside.unlink()
    if damage in {"spec", "all"}:
        (folder / "spec.json").write_text('{"job": {"name"')
    if damage == "folder":
        (folder / "flow.log").unlink()
        folder.rmdir()
    done = here("admin", "support-bundle", "gpt-small", "-o", "b.tar.gz")
    assert done.returncode == 0, done.stderr
    texts = contents(tmp_path / "b.tar.gz")
    assert ("history" in texts["README.txt"].partition("Missing, and why")[2]) == (damage in {"history", "all"})
    assert ("job/spec" in texts["README.txt"].partition("Missing, and why")[2]) == (damage in {"history", "all"})
    assert ("half a line" in texts.get("job/flow.log", "")) == (damage != "folder")
    assert "holdfast" in texts["versions.json"]


def test_without_a_job_the_bundle_describes_the_installation(here: Command, tmp_path: Path) -> None:
    """On a fresh machine too."""
    done = here("admin", "support-bundle")
    assert done.returncode == 0
    (path,) = tmp_path.glob("holdfast-support-all-*.tar.gz")
    assert done.stdout.strip() == path.name
    assert "job:      none" in contents(path)["README.txt"]


def test_an_unknown_job_and_an_unwritable_file_are_refused(here: Command, running: Author, tmp_path: Path) -> None:
    """With the nearest name, and with the reason; nothing is left."""
    assert "gpt-small" in here("admin", "support-bundle", "gpt-smal").stderr
    done = here("admin", "support-bundle", "-o", str(tmp_path / "missing" / "b.tar.gz"))
    assert (done.returncode, "No such file" in done.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "address", ["postgresql://hf:{}@127.0.0.1:1/db", "hf:{}@127.0.0.1:1/db", "postgresql:///db?host=/none&password={}"]
)
def test_a_password_that_is_no_valid_url_part_is_redacted(
    here: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str
) -> None:
    """SQLAlchemy takes a slash in a password, as `openssl rand -base64` makes them: it is learnt from the address."""
    password = "aB3/xYz+q9="
    monkeypatch.setenv("HOLDFAST_HISTORY", address.format(password))
    here("admin", "support-bundle", "-o", "b.tar.gz")
    texts = contents(tmp_path / "b.tar.gz")
    assert "127.0.0.1:1" in texts["environment.json"] or "host=/none" in texts["environment.json"]
    assert [name for name, text in texts.items() if "aB3" in text or "q9=" in text] == []
    assert "***" in texts["README.txt"].partition("history:")[2].partition("\n")[0]
