"""The dashboard and the alert rules, evaluated by a real Prometheus that scrapes a recorded history."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from holdfast.history.models import Checkpoint, HealthSample, Lease
from holdfast.history.store import History
from holdfast.policies.states import TERMINAL, State
from holdfast.report.metrics.families import collect
from tests.cli.conftest import PROGRAM, ROOT, environment
from tests.cli.test_metrics import fetch, listening, moved, say
from tests.cli.written_history import Author, a_running_job
from tests.waiting import wait_until

FOLDER = ROOT / "deployments" / "grafana"
DASHBOARD: Final[dict[str, Any]] = json.loads((FOLDER / "holdfast.json").read_text())
RULES = FOLDER / "alerts.yaml"
VARIABLES = {"$job": ".*", "$__rate_interval": "10s", "$__range": "1h"}
"""What Grafana would put in place of the dashboard's variables."""
LIVE_ONLY = (
    "Step",
    "Loss",
    "Seconds since the newest step",
    "Step time",
    "Ranks",
    "Seconds since the controller renewed its lease",
    "Age of the newest checkpoint",
    "Age of the newest in-memory snapshot, in steps",
    "Cost of in-memory snapshots",
    "Size of checkpoints and snapshots",
)
"""Panels that show no job that has ended."""

Series = list[dict[str, Any]]


@dataclass
class Prometheus:
    """A Prometheus that runs, and what it answers."""

    url: str
    log: Path

    def ask(self, path: str, **parameters: object) -> Any:
        """Return the data of an answer; an error of Prometheus fails the test with its message."""
        status, _, body = fetch(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}")
        answer = json.loads(body)
        assert (status, answer["status"], answer.get("warnings")) == (200, "success", None), (parameters, body)
        return answer["data"]

    def now(self, query: str) -> Series:
        """Evaluate *query* now."""
        found: Series = self.ask("query", query=query)["result"]
        return found

    def value(self, query: str) -> float | None:
        """Return the single value of *query* now, or None."""
        found = self.now(query)
        assert len(found) < 2, (query, found)
        return float(found[0]["value"][1]) if found else None

    def range(self, query: str, step: str = "1s") -> Series:
        """Evaluate *query* over the past minute."""
        end = time.time()
        found: Series = self.ask("query_range", query=query, start=end - 60, end=end, step=step)["result"]
        return found

    def shows(self, panel: dict[str, Any]) -> Series:
        """Return what a panel of the dashboard shows: of the past minute, or now for an instant query."""
        return [
            series for target in panel["targets"] for series in (self.now if target.get("instant") else self.range)(shown(target["expr"]))
        ]

    def said(self) -> str:
        """Return the end of its log."""
        return self.log.read_text()[-3000:]


def programs() -> tuple[str, str]:
    """Return Prometheus and promtool; skip where they are not installed."""
    found = shutil.which("prometheus"), shutil.which("promtool")
    if found[0] is None or found[1] is None:
        pytest.skip("Prometheus is not installed: scripts/system_packages.sh installs it (Debian's package `prometheus`)")
    return found[0], found[1]


def shown(query: str) -> str:
    """Return a query of the dashboard as Grafana sends it."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    assert "$" not in query, query
    return query


def panels() -> list[dict[str, Any]]:
    """Return the panels that show something."""
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def marks() -> dict[str, dict[str, Any]]:
    """Return our annotations, by name."""
    return {one["name"]: one for one in DASHBOARD["annotations"]["list"] if not one.get("builtIn")}


class Metrics:
    """`holdfast admin metrics` on the history in a folder."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._child, self.port = self._start(0)

    def _start(self, port: int) -> tuple[subprocess.Popen[str], int]:
        command = [*PROGRAM, "admin", "metrics", "--serve", str(port)]
        child = subprocess.Popen(command, env=environment(HOLDFAST_HOME=str(self._home)), stderr=subprocess.PIPE, text=True)
        assert child.stderr is not None
        return child, int(child.stderr.readline().split()[2].split(":")[2].partition("/")[0])

    def restart(self, meanwhile: Callable[[], object]) -> None:
        """End it, do something, and start it at the same port."""
        self.end()
        meanwhile()
        self._child, _ = self._start(self.port)

    def end(self) -> None:
        """End it."""
        self._child.terminate()
        assert self._child.wait(60) == 0
        assert self._child.stderr is not None
        self._child.stderr.close()


@dataclass(kw_only=True)
class Recorded:
    """A history of five jobs, scraped by a Prometheus before, during and after the first incident of one of them."""

    prometheus: Prometheus
    fault_at: float
    """When that incident began."""
    panels: dict[str, Series]
    """What each panel of the dashboard shows, by its title."""

    def counted(self, title: str) -> dict[str, int]:
        """Return the newest value of each series of a panel, by its one label, without those that are 0."""
        found = {next(iter(one["metric"].values())): round(float(one["values"][-1][1])) for one in self.panels[title]}
        return {label: value for label, value in found.items() if value}


def a_job(book: History, name: str, *, ago: float) -> Author:
    """Write a job that began to train so many seconds *ago*."""
    author = Author(book, name, time.time() - ago)
    author.move("LAUNCHING", "submitted", seconds=0, event="submitted")
    author.generation(1, {"n0": [0, 1], "n1": [2, 3]}, seconds=0)
    author.steps(1, 100, generation=1, seconds=0)
    author.write(Checkpoint(job_id=author.job.id, at=author.zero + 5, step=50, generation=1, path="/somewhere", seconds=0.1, size=10**9))
    author.snapshots(1, step=99)
    author.move("RUNNING", "every worker made its first step", seconds=1)
    return author


def lease_of(author: Author) -> Lease:
    """Return a lease of a controller on another host, which renews it."""
    return Lease(job_id=author.job.id, epoch=1, holder="x", host="elsewhere", pid=1, pid_started=0.0, expires_at=time.time() + 3600)


def record(book: History) -> Author:
    """Write five jobs and some nodes; return the job that trains."""
    a_job(book, "finished", ago=600).move("COMPLETED", "every rank ended", seconds=30, event="finished")
    a_job(book, "paused", ago=600).move("SUSPENDED", "suspended in Prefect", seconds=30, event="suspend-asked")
    quiet = a_job(book, "quiet", ago=60)
    recovering = a_running_job(book, "recovering", time.time() - 50)
    say(book, lease_of(quiet), lease_of(recovering), HealthSample(cluster="local", node="node-2", at=1.0, health={"status": "healthy"}))
    say(book, moved(1, "healthy", "quarantined"))
    return a_job(book, "live", ago=30)


@contextmanager
def scraping(port: int, folder: Path) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes `holdfast admin metrics` at *port* every second, as deployments/README.md has it."""
    each = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    ours = {"job_name": "holdfast", "honor_labels": True, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
    settings = {"global": each, "rule_files": [str(RULES)], "scrape_configs": [ours]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    command = [programs()[0], f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    log = folder / "prometheus.log"
    with log.open("w") as said:
        child = subprocess.Popen([*command, "--web.listen-address=127.0.0.1:0"], stdout=said, stderr=subprocess.STDOUT)
    try:
        (address,) = wait_until(lambda: listening(child.pid), seconds=60, explain=log.read_text)
        made = Prometheus(f"http://127.0.0.1:{int(address.partition(':')[2], 16)}", log)
        wait_until(lambda: fetch(f"{made.url}/-/ready")[0] == 200, seconds=60, explain=made.said)
        yield made
    finally:
        child.terminate()
        child.wait(60)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """Give the history when it has been scraped: five jobs, then an incident of the one that had none, then a restart of the metrics."""
    programs()
    home = tmp_path_factory.mktemp("h")
    book = History.open(f"sqlite:///{home}/history.db")
    live = record(book)
    metrics = Metrics(home)
    try:
        with scraping(metrics.port, tmp_path_factory.mktemp("prometheus")) as prometheus:

            def wait_for(query: str) -> None:
                wait_until(lambda: prometheus.now(query), seconds=60, explain=prometheus.said)

            wait_for('count_over_time(holdfast_job_step{job="live"}[1h]) > 1')
            seconds = time.time() - live.zero
            live.checkpoint(60, seconds=seconds, problem="checkpoint-disk-full")
            fault_at = live.incident(1, "worker-sigkill", "rank 1 on n0", seconds=seconds).fault_at
            wait_for('sum(holdfast_incidents_total{job="live"}) == 1')
            metrics.restart(lambda: wait_for("up == 0"))
            wait_for("up == 1")
            found = dict[str, Series]()

            def without_data() -> list[str]:
                found.update({panel["title"]: prometheus.shows(panel) for panel in panels()})
                return [title for title, series in found.items() if not series]

            wait_until(lambda: not without_data(), seconds=60, explain=lambda: str(without_data()))  # a slow scrape hides all for a moment
            yield Recorded(prometheus=prometheus, fault_at=fault_at, panels=found)
    finally:
        metrics.end()
        book.close()


def jobs_in(found: Series) -> set[str]:
    """Return the jobs that series are of."""
    return {one["metric"]["job"] for one in found}


def events(mark: dict[str, Any], found: Series) -> list[tuple[float, str, str]]:
    """Return time, title and text of each annotation, as Grafana makes them of the series."""

    def named(words: str, labels: dict[str, str]) -> str:
        return re.sub(r"\{\{(\w+)\}\}", lambda label: labels[label[1]], words)

    made = set()
    for one in found:
        for at, value in one["values"]:
            when = float(value) / 1000 if mark["useValueForTime"] else at
            if float(value) > 0:
                made.add((when, named(mark["titleFormat"], one["metric"]), named(mark["textFormat"], one["metric"])))
    return sorted(made)


@pytest.mark.long
def test_every_panel_shows_the_recorded_history(recorded: Recorded) -> None:
    """Each query of the dashboard is one that Prometheus answers, and has data."""
    assert len(recorded.panels) == len(panels()) > 25
    assert all(recorded.panels.values())
    names = recorded.prometheus.ask("label/job/values", **{"match[]": "holdfast_job_info"})
    assert names == ["finished", "live", "paused", "quiet", "recovering"]


@pytest.mark.long
def test_the_first_incident_of_a_job_counts(recorded: Recorded) -> None:
    """Once, also after a restart of the metrics; incidents that were over before the first scrape do not count as new ones."""
    assert recorded.counted("Incidents in the past hour, by area") == {"software": 1}
    assert recorded.counted("Incidents in the past hour, by recovery action") == {"restart-workers": 1}
    assert recorded.counted("Faults in the past hour, by recommended action") == {"restart": 1}
    assert recorded.counted("Checkpoint problems in the past hour") == {"checkpoint-disk-full": 1}
    assert recorded.counted("Steps lost in the past hour") == {"live": 2}
    for counter in ("incidents", "recovery_actions", "faults", "lost_steps", "checkpoint_problems", "checkpoints"):
        assert recorded.prometheus.value(f"sum(resets(holdfast_{counter}_total[1h]))") == 0
    kinds = {(one["metric"]["job"], one["metric"]["kind"], one["value"][1]) for one in recorded.panels["Incidents by kind"]}
    assert {("live", "worker-sigkill", "1"), ("recovering", "node-lost", "1")} <= kinds


def test_a_job_that_has_ended_or_is_suspended_is_not_shown_as_one_that_hangs(recorded: Recorded) -> None:
    """Nor anywhere else where only the present counts; one that recovers has no "seconds since the newest step" either."""
    for title in LIVE_ONLY:
        assert not {"finished", "paused"} & jobs_in(recorded.panels[title]), title
        assert "quiet" in jobs_in(recorded.panels[title]), title
    assert jobs_in(recorded.panels["Seconds since the newest step"]) == {"quiet", "live"}
    assert "finished" in jobs_in(recorded.panels["ETTR"])
    assert max(value for one in recorded.panels["Jobs without a controller"] for _, value in one["values"]) == "1"
    (node,) = recorded.panels["Nodes that are not healthy"]
    assert (node["metric"]["node"], node["metric"]["state"]) == ("node-1", "quarantined")


def test_incidents_are_marked_where_they_happened(recorded: Recorded) -> None:
    """To the millisecond and by their kind; open ones for as long as they are open."""
    made = {name: events(mark, recorded.prometheus.range(shown(mark["expr"]))) for name, mark in marks().items()}
    (mark,) = [one for one in made["Incidents"] if one[2].startswith("live:")]
    assert mark[0] == pytest.approx(recorded.fault_at, abs=0.002)
    assert mark[1:] == ("worker-sigkill", "live: restart-workers, recovered")
    assert {text for _, _, text in made["Open incidents"]} == {"recovering"}


def test_every_rule_is_evaluated(recorded: Recorded) -> None:
    """Without an error; those whose condition is true fire, or wait until it has been true long enough."""
    rules = [rule for group in recorded.prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == len(re.findall("- alert:", RULES.read_text()))
    assert {(rule["name"], rule["health"]) for rule in rules} == {(rule["name"], "ok") for rule in rules}
    expected = {"HoldfastJobWithoutController", "HoldfastJobNotTraining", "HoldfastNodeQuarantined", "HoldfastCheckpointFails"}

    def raised() -> set[str]:
        return {one["labels"]["alertname"] for one in recorded.prometheus.ask("alerts")["alerts"]}

    wait_until(lambda: raised() == expected, seconds=60, explain=lambda: str(raised()))


@pytest.mark.parametrize("words", [("check", "rules", str(RULES)), ("test", "rules", str(Path(__file__).with_name("alerts_test.yaml")))])
def test_alerts_fire_when_they_should(words: tuple[str, ...]) -> None:
    """By promtool: the rules are well-formed, each fires in time with a text that names job or node, and never otherwise."""
    done = subprocess.run([programs()[1], *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [line for line in done.stderr.splitlines() if "FAILED" in line]


def test_each_alert_is_tested() -> None:
    """Every rule has a test of when it fires."""
    tests = Path(__file__).with_name("alerts_test.yaml").read_text()
    assert not {name for name in re.findall(r"alert: (\w+)", RULES.read_text()) if name not in tests}


def queries() -> list[str]:
    """Return every query of dashboard and rules."""
    rules = [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    return [target["expr"] for panel in panels() for target in panel["targets"]] + [mark["expr"] for mark in marks().values()] + rules


def test_queries_ask_for_metrics_that_there_are(book: History) -> None:
    """By their names, and for a rate of counters only."""
    ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
    kinds = {one.name + end: one.type for one in collect(book) for end in ends.get(one.type, ("",))}
    for query in queries():
        asked = set(re.findall(r"\bholdfast_\w+", query))
        assert asked, query
        assert asked <= set(kinds), query
        assert {kinds[name] for name in re.findall(r"(?:rate|increase)\((holdfast_\w+)", query)} <= {"counter", "histogram", "summary"}, (
            query
        )


def test_queries_name_the_states_that_there_are() -> None:
    """Each matcher names all states in which a job has no nodes, or trains: a new or renamed one would look like a hang."""
    ends, trains = {state.lower() for state in TERMINAL | {State.SUSPENDED}}, {"running", "migrating"}
    named = {frozenset(found.split("|")) for query in queries() for found in re.findall(r'holdfast_job_state\{state[=!~]+"([^"]+)"', query)}
    assert named == {frozenset(ends), frozenset(trains), frozenset(ends | trains), frozenset({"failed"})}
    assert trains <= {state.lower() for state in State}


def test_the_dashboard_is_one_that_grafana_loads() -> None:
    """Each panel has a place and an id of its own and asks the chosen Prometheus; marks name panels that there are."""
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    taken = [(x, y) for one in places for x in range(one["x"], one["x"] + one["w"]) for y in range(one["y"], one["y"] + one["h"])]
    assert len(set(taken)) == len(taken)
    assert max(x for x, _ in taken) < 24
    ids = {panel["id"]: panel for panel in DASHBOARD["panels"]}
    assert len(ids) == len(places)
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    for panel in panels():
        assert panel["type"] in {"stat", "gauge", "timeseries", "bargauge", "piechart", "table"}
        assert [panel["datasource"], *(target["datasource"] for target in panel["targets"])] == [chosen] * (len(panel["targets"]) + 1)
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    assert [one["name"] for one in DASHBOARD["templating"]["list"]] == ["datasource", "job"]
    for mark in marks().values():
        assert (mark["datasource"], mark["enable"]) == (chosen, True)
        assert {"Loss", "Step"} <= {ids[one]["title"] for one in mark["filter"]["ids"]}
