"""The metrics as Prometheus reads them: by its own parser, over its own protocol."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families
from sqlmodel import SQLModel

from holdfast.history.models import ApprovalRequest, HealthSample, NodeStatusChange, ServiceTransition, Snapshots
from holdfast.history.store import History
from holdfast.report.metrics.families import collect
from holdfast.report.metrics.incidents import add_histogram
from holdfast.report.metrics.serving import MAX_CONNECTIONS, MetricsServer
from tests.cli.conftest import PROGRAM, Command, environment
from tests.cli.written_history import Author
from tests.report import filled
from tests.waiting import wait_until

EVIL = 'a"b\\c\nd{e="f"} 1'


def parsed(output: str) -> dict[str, Metric]:
    """Return the families in the text, parsed by Prometheus' own client."""
    return {family.name: family for family in text_string_to_metric_families(output)}


@dataclass
class Fixed:
    """A collector that has the same families at each scrape."""

    families: list[Metric]

    def collect(self) -> list[Metric]:
        """Return them."""
        return self.families


def text(families: list[Metric]) -> str:
    """Return *families* as text."""
    return generate_latest(Fixed(families)).decode()


def counted(book: History) -> dict[str, dict[tuple[str, ...], float]]:
    """Return every counter: the name of its series, the values of its labels, and its value."""
    counters = [one for one in collect(book) if one.type == "counter"]
    return {f"{one.name}_total": {tuple(sample.labels.values()): sample.value for sample in one.samples} for one in counters}


def value(families: dict[str, Metric], name: str, **labels: str) -> float:
    """Return the one sample of this name that has these labels."""
    found = [
        one.value
        for family in families.values()
        for one in family.samples
        if one.name == name and all(one.labels.get(key) == wanted for key, wanted in labels.items())
    ]
    assert len(found) == 1, (name, labels, found)
    return float(found[0])


def say(history: History, *rows: SQLModel) -> None:
    """Write rows."""
    with history.session() as session:
        session.add_all(rows)


def moved(number: int, before: str, after: str) -> ServiceTransition:
    """Return a move of a node's state."""
    return ServiceTransition(
        cluster="local",
        node="node-1",
        number=number,
        at=number,
        before=before,
        event="x",
        after=after,
        owner="x",
        person=False,
        reason="",
        cordon=1,
    )


def test_the_history_is_exported(here: Command, book: History, running: Author) -> None:
    """Each number is that of the history; the parser finds nothing wrong."""
    say(
        book,
        *(NodeStatusChange(cluster="local", node=f"node-{number}", at=1.0, status="healthy", reason="") for number in range(3)),
        moved(1, "healthy", "suspect"),
        moved(2, "suspect", "quarantined"),
        HealthSample(cluster="lab", node="w1", at=1.0, health={"status": "unhealthy"}),
        Snapshots(job_id=running.job.id, generation=9, at=1.0, step=3, age_steps=2, trained_s=10.0, cost_s=0.1, size=4096),
        ApprovalRequest(number=1, cluster="local", job_id="", job="", about="share", nodes={}, reason="", otherwise="keep", at=0, until=0),
    )
    output = parsed(here("admin", "metrics").stdout)
    look = json.loads(here("status", "gpt-small", "--json").stdout)
    assert value(output, "holdfast_jobs", state=look["state"].lower()) == 1
    assert value(output, "holdfast_job_state", job="gpt-small", state=look["state"].lower()) == 1
    assert value(output, "holdfast_job_state", job="gpt-small", state="completed") == 0
    assert value(output, "holdfast_job_info", job="gpt-small") == 1
    assert value(output, "holdfast_job_step", job="gpt-small") == look["step"]
    assert value(output, "holdfast_job_loss", job="gpt-small") == pytest.approx(look["loss"], nan_ok=True)
    assert value(output, "holdfast_job_ranks", job="gpt-small") == look["world_size"]
    assert value(output, "holdfast_checkpoint_step", job="gpt-small") == look["checkpoint"]["step"]
    closed = sum(one.value for one in output["holdfast_incidents"].samples)
    assert closed + value(output, "holdfast_incidents_open", job="gpt-small") == look["incidents"]
    assert value(output, "holdfast_recovery_seconds_count", job="gpt-small") <= closed
    assert value(output, "holdfast_nodes", cluster="local", state="quarantined") == 1
    assert value(output, "holdfast_nodes", cluster="local", state="healthy") == 2
    assert value(output, "holdfast_node_health", cluster="lab", health="unhealthy") == 1
    assert value(output, "holdfast_snapshot_age_steps", job="gpt-small") == 2
    assert value(output, "holdfast_snapshot_cost_ratio", job="gpt-small") == pytest.approx(0.01)
    assert value(output, "holdfast_approvals_pending") == 1


def test_time_metrics_equal_the_cost_command(here: Command, book: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """ETTR, what became of the time, downtime by phase, steps lost."""
    filled.three_incidents(book)
    monkeypatch.setattr("holdfast.report.metrics.jobs.SHOWN_SECONDS", math.inf)  # it ended long ago
    output, bill = parsed(here("admin", "metrics").stdout), json.loads(here("cost", "bytes-gpt", "--json").stdout)
    ettr = value(output, "holdfast_job_effective_training_time_ratio", job="bytes-gpt")
    assert ettr == pytest.approx(bill["ettr"])
    held = {one.labels["category"]: one.value for one in output["holdfast_job_time_seconds"].samples}
    assert held["productive"] / 3600 == pytest.approx(bill["categories"]["productive"])
    assert held["lost_to_failures"] / 3600 == pytest.approx(bill["categories"]["lost to failures"])
    assert value(output, "holdfast_recovery_seconds_count", job="bytes-gpt") == bill["recoveries"] == 3
    assert sum(one.value for one in output["holdfast_incidents"].samples) == 3
    sums = {one.labels["phase"]: one.value for one in output["holdfast_downtime_seconds"].samples if one.name.endswith("_sum")}
    assert set(sums) >= {"detect", "isolate", "reschedule", "rollback"}
    without = sum(seconds for phase, seconds in sums.items() if phase != "rollback")
    assert without == pytest.approx(value(output, "holdfast_recovery_seconds_sum", job="bytes-gpt"), rel=0.01)


def test_every_counter_of_a_job_begins_at_zero(book: History) -> None:
    """With each value of its labels, as `increase()` does not count a series that appears with its first event."""
    author = Author(book, "fresh", time.time())
    counters = counted(book)
    assert all(samples and not any(samples.values()) for samples in counters.values()), counters
    author.incident(1, "worker-sigkill", "rank 1 on n0", seconds=0)
    author.incident(2, "a kind of a later version", "rank 1 on n0", seconds=0, action="a later action")
    author.checkpoint(1, seconds=0, problem="checkpoint-torn")
    author.incident(3, "worker-sigkill", "rank 1 on n0", seconds=0, is_open=True)
    later = counted(book)
    grown = {
        name: {labels[1:]: value for labels, value in samples.items() if value and len(labels) > 1}
        for name, samples in later.items()
        if any(len(labels) > 1 for labels in samples)
    }
    assert grown == {
        "holdfast_incidents_total": {("software", "recovered"): 1, ("other", "recovered"): 1},
        "holdfast_recovery_actions_total": {("restart-workers",): 1, ("a later action",): 1},
        "holdfast_faults_total": {("restart",): 3},
        "holdfast_checkpoint_problems_total": {("checkpoint-torn",): 1},
    }
    new = {name: set(later[name]) - set(samples) for name, samples in counters.items()}
    assert {labels[1] for series in new.values() for labels in series} == {"other", "a later action"}, "of what nobody could know"


def test_a_job_that_ended_long_ago_is_not_exported(here: Command, book: History) -> None:
    """Unused names would stay in Prometheus."""
    filled.three_incidents(book)
    assert "bytes-gpt" not in here("admin", "metrics").stdout


def test_an_absent_history_exports_nothing(here: Command) -> None:
    """On a new machine everything is zero or absent, and each family has its description."""
    done = here("admin", "metrics")
    assert done.returncode == 0
    families = parsed(done.stdout)
    assert value(families, "holdfast_jobs", state="running") == 0
    assert all(one.documentation for one in families.values())


def test_names_of_jobs_are_escaped(book: History) -> None:
    """Quotes, backslashes, ends of lines and halves of characters."""
    for name in (EVIL, "\ud800", "ü\u2028"):
        Author(book, name, time.time())
    output = text(collect(book))
    names = {one.labels["job"] for one in parsed(output)["holdfast_job_info"].samples}
    assert EVIL in names
    assert len(names) == 3
    assert not [line for line in output.splitlines() if not re.match(r"holdfast_|# (HELP|TYPE) holdfast_", line)] or "\u2028" in output


def test_a_histogram_counts_what_is_at_most_as_large() -> None:
    """A value on a bound belongs below it; the last bucket has all."""
    family = HistogramMetricFamily("x", "X.", labels=["job"])
    add_histogram(family, ["a"], [0.5, 1.0, 7.0], (1.0, 5.0))
    samples = {(one.name, one.labels.get("le")): one.value for one in parsed(text([family]))["x"].samples}
    assert samples == {("x_bucket", "1"): 2, ("x_bucket", "5"): 2, ("x_bucket", "+Inf"): 3, ("x_sum", None): 8.5, ("x_count", None): 3}


def test_programs_get_the_same_as_json(here: Command, running: Author) -> None:
    """Name, kind, help and samples of each family."""
    output = json.loads(here("admin", "metrics", "--json").stdout)
    step = next(one for one in output if one["name"] == "holdfast_job_step")
    assert (step["type"], step["samples"][0]["labels"]) == ("gauge", {"job": "gpt-small"})
    lost = next(one for one in output if one["name"] == "holdfast_lost_steps_total")
    assert (lost["type"], lost["samples"][0]["name"]) == ("counter", "holdfast_lost_steps_total")


def test_the_textfile_is_complete_and_readable(here: Command, running: Author, tmp_path: Path) -> None:
    """For the user of node_exporter, without leftovers; an unwritable file is reported."""
    path = tmp_path / "out" / "holdfast.prom"
    path.parent.mkdir()
    path.write_text("older")
    assert here("admin", "metrics", "--output", str(path)).returncode == 0
    assert value(parsed(path.read_text()), "holdfast_job_info", job="gpt-small") == 1
    assert path.stat().st_mode & 0o777 == 0o644
    assert [one.name for one in path.parent.iterdir()] == ["holdfast.prom"]
    refused = here("admin", "metrics", "--output", str(tmp_path / "missing" / "holdfast.prom"))
    assert refused.returncode == 2
    assert "No such file or directory" in refused.stderr


@pytest.fixture
def served(holdfast_home: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Give a server of metrics and its address."""
    child = subprocess.Popen([*PROGRAM, "admin", "metrics", "--serve", "0"], env=environment(), stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    line = child.stderr.readline()
    yield child, line.split()[2]
    child.terminate()
    assert child.wait(60) == 0
    with child.stderr:
        assert child.stderr.read() == ""


def fetch(url: str, **headers: str) -> tuple[int, str, str]:
    """Return status, kind and text of what is at *url*."""
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 (our own address)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 (our own address)
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def listening(pid: int) -> set[str]:
    """Return the addresses at which a process listens, as the kernel writes them."""
    inodes = {link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink() and "socket:" in str(link.readlink())}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}


def test_prometheus_is_answered_on_the_loopback(served: tuple[subprocess.Popen[str], str], book: History, holdfast_home: Path) -> None:
    """Changes since the last scrape are exported; other paths and methods are refused; a damaged history makes the target down."""
    child, url = served
    assert url.startswith("http://127.0.0.1:")
    assert {one.partition(":")[0] for one in listening(child.pid)} == {"0100007F"}
    assert fetch(url)[:2] == (200, "text/plain; version=0.0.4; charset=utf-8")
    Author(book, "late", time.time())
    assert value(parsed(fetch(url)[2]), "holdfast_job_info", job="late") == 1
    status, kind, openmetrics = fetch(f"{url}?name[]=x", Accept="application/openmetrics-text;version=1.0.0")
    assert (status, kind.partition(";")[0]) == (200, "application/openmetrics-text"), "the format that Prometheus asks for first"
    families = {one.name: one for one in openmetrics_families(openmetrics)}  # type: ignore[no-untyped-call]
    assert value(families, "holdfast_job_info", job="late") == 1
    assert fetch(url.replace("/metrics", "/other"))[0] == 404
    database = holdfast_home / "history.db"
    kept = database.read_bytes()
    book.close()
    for beside in database.parent.glob("history.db-*"):
        beside.unlink()
    database.write_bytes(b"no database at all, but long enough to be taken for one" * 40)
    wait_until(lambda: fetch(url)[0] == 503, seconds=60)
    database.write_bytes(kept)
    wait_until(lambda: fetch(url)[0] == 200, seconds=60)


@pytest.mark.parametrize("where", ["nowhere", "192.0.2.1:9464", "127.0.0.1:70000", "no.such.host.example.org:9464", "", ":"])
def test_an_invalid_address_is_refused_with_the_cure(here: Command, where: str) -> None:
    """Not with a traceback."""
    done = here("admin", "metrics", "--serve", where)
    assert done.returncode == 2
    assert "as in `--serve 9464`" in done.stderr


@contextmanager
def serving() -> Iterator[MetricsServer]:
    """Serve in this process."""
    server = MetricsServer(("127.0.0.1", 0), Fixed([GaugeMetricFamily("x", "X.", 1)]))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.long
def test_silent_clients_neither_block_prometheus_nor_accumulate() -> None:
    """Far more than may be there at once."""
    with serving() as server, ExitStack() as lines:
        before = threading.active_count()
        silent = [
            lines.enter_context(socket.create_connection(("127.0.0.1", server.server_port), timeout=60)) for _ in range(4 * MAX_CONNECTIONS)
        ]
        assert fetch(f"http://127.0.0.1:{server.server_port}/metrics")[0] == 200
        assert silent[0].recv(1) == b"", "the oldest has been hung up on"
        wait_until(lambda: threading.active_count() <= before + MAX_CONNECTIONS, seconds=60)


def test_a_request_has_a_total_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then holds no thread for ever."""
    monkeypatch.setattr("holdfast.report.metrics.serving.TIMEOUT", 0.5)
    with serving() as server, socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as line:

        def gone() -> bool:
            try:
                line.sendall(b"x")
            except OSError:
                return True
            return False

        wait_until(gone, seconds=60)


def test_the_file_for_node_exporter_follows_no_link(here: Command, running: Author, tmp_path: Path) -> None:
    """Others may write to its folder; their links are not followed."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in (f".holdfast.prom.{os.getpid()}", "holdfast.prom"):
        (tmp_path / name).symlink_to(victim)
    assert here("admin", "metrics", "--output", "holdfast.prom").returncode == 0
    assert victim.read_text() == "precious"
    assert "holdfast_job_info" in (tmp_path / "holdfast.prom").read_text()
    assert not (tmp_path / "holdfast.prom").is_symlink()


def test_exclusive_options_are_refused(here: Command, tmp_path: Path) -> None:
    """One at a time."""
    assert "exclude each other" in here("admin", "metrics", "--json", "--output", str(tmp_path / "x")).stderr
