"""Scenario files and traces: what cannot be simulated is refused with the field, the line and a cure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import BadFile
from holdfast.simulator.scenario import load_scenario
from holdfast.simulator.trace import load_trace

GOOD = """\
name: small
duration: 10d
cluster: {nodes: 12, hot_spares: 1}
jobs:
  - nnodes: 8
    step: 10s
faults:
  constant_rate: {per_1000_node_days: 6.5}
"""


def refused(tmp_path: Path, text: str) -> str:
    """Return how the scenario *text* is refused."""
    file = tmp_path / "scenario.yaml"
    file.write_text(text)
    with pytest.raises(BadFile) as error:
        load_scenario(file)
    return str(error.value)


def test_a_scenario_is_read_with_its_defaults(tmp_path: Path) -> None:
    """Units as in job files, numbers of nodes as in torchrun."""
    file = tmp_path / "scenario.yaml"
    file.write_text(GOOD.replace("nnodes: 8", 'nnodes: "6:8"'))
    found = load_scenario(file)
    assert (found.duration.days, found.jobs[0].nodes, found.jobs[0].min_nodes, found.spares) == (10, 8, 6, 4)
    assert found.systems == ["holdfast-groups", "restart-hot-spares", "torchrun"]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("duration: 10d", "duration: 10", ("line 2", "has no unit", '"10s"')),
        ("step: 10s", "steps: 10s", ("jobs[0].steps", "line 6", "unknown field", "Did you mean 'step'")),
        ("nodes: 12", "nodes: 12, burn_inn: 1h", ("cluster.burn_inn", "Did you mean 'burn_in'")),
        ("nodes: 12", "nodes: 6", ("cluster.nodes", "the jobs need 8 nodes, and the cluster has 6", "at least 8")),
        ("hot_spares: 1", "hot_spares: 5", ("cluster.hot_spares", "5 hot spares are more than the 4 nodes that no job needs", "13")),
        ("nnodes: 8", "nnodes: 0", ("jobs[0].nnodes", "number of nodes")),
        ("step: 10s", "copies: 3", ("jobs[0].copies", "8 nodes cannot hold 3 copies", "divisor of 8")),
        ("per_1000_node_days: 6.5", "per_1000_node_days: -1", ("faults.constant_rate.per_1000_node_days", "greater than or equal to 0")),
        ("  constant_rate: {per_1000_node_days: 6.5}", "  {}", ("faults", "no source of faults", "`trace:`")),
        ("constant_rate: {per_1000_node_days: 6.5}", "trace: {file: none.json}", ("faults.trace.file", "does not exist", "`infinitehbd`")),
        ("name: small", "name: small\nsystems: [torchrunn]", ("systems[0]", "'torchrunn'", "Did you mean 'torchrun'")),
        ("name: small", "name: small\npolicy: agressive", ("policy", "'agressive'", "Did you mean 'aggressive'")),
        ("name: small", "script: train.py", ("describes a job or a cluster",)),
        ("step: 10s", "state: 1.8TB", ("jobs[0].state", "line 6", "without `cluster.links`", "`links: {network: 400Gbit/s")),
        ("hot_spares: 1", "links: {network: 400Gbit/s, storage: 2TB/s}", ("cluster.links", "no job says how large its state is")),
        ("hot_spares: 1", "links: {network: 400, storage: 2TB/s}", ("cluster.links.network", "400 has no unit", '"400Gbit/s"')),
        ("hot_spares: 1", "links: {network: 0GB/s, storage: 2TB/s}", ("cluster.links.network", "is not a bandwidth")),
        ("step: 10s", "stages: 7", ("jobs[0].stages", "64 GPUs of a copy cannot hold 7 pipeline stages", "divisor of 64")),
        ("name: small", "name: small\nsystems: [bamboo]", ("jobs[0].stages", "under Bamboo", "Write 2 or more")),
        (
            "step: 10s",
            "checkpoint: {interval: 30s, overlapped: 5m}",
            ("jobs[0].checkpoint.interval", "line 6", "written for 5m", "30s after it", "or `auto`"),
        ),
        ("step: 10s", "checkpoint: {interval: 1s}", ("jobs[0].checkpoint.interval", "written for 1m", "`overlapped`")),
        ("step: 10s", "checkpoint: {interval: 11d}", ("jobs[0].checkpoint.interval", "no checkpoint is due within the 10d")),
        ("step: 10s", "step: 11d", ("jobs[0].step", "a step of 11d does not end within the 10d")),
        ("nodes: 12", "nodes: 12, nodes_per_rack: 13", ("cluster.nodes_per_rack", "a rack of 13 nodes", "Write 12 or fewer")),
        ("constant_rate: {per_1000_node_days: 6.5}", "bug: {at: 10d}", ("faults.bug.at", "comes after the 10d")),
        (
            "name: small",
            "name: small\nmaintenance: {interval: 1h, nodes: 4, duration: 4h}",
            ("maintenance.interval", "16 nodes of 12 would be out at once", "longer interval"),
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence_with_a_cure(tmp_path: Path, before: str, after: str, said: tuple[str, ...]) -> None:
    """Each with its field, and with the line if it stands in one."""
    text = refused(tmp_path, GOOD.replace(before, after))
    assert text.count("\n") == 1, text
    for part in said:
        assert part in text, text


def event(node: str, at: float, kind: str = "fault_start") -> dict[str, Any]:
    """Return an event of a trace."""
    return {"node_id": node, "event_time": at, "event_type": kind, "fault_type": {"Level": "", "Class": "GPU", "Desc": "GPU Lost"}}


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([], "not a list of events"),
        ([{"node": "a"}], "is not an event"),
        ([event("a", 1.0)], "never ends"),
        ([event("a", 1.0, "fault_end")], "that never started"),
        ([event("a", 2.0), event("a", 1.0, "fault_end")], "before that of the event above"),
        ([event("a", 1.0), event("a", 2.0, "fault_end"), event("b", 300.0), event("b", 301.0, "fault_end")], "from 2 d to 300 d"),
        ([event("a", float("nan")), event("a", 2.0, "fault_end")], "is not an event"),
    ],
)
def test_a_trace_with_gaps_is_refused(tmp_path: Path, events: list[dict[str, Any]], said: str) -> None:
    """Faults without beginning or end, times out of order, and months without any event."""
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(events))
    with pytest.raises(BadFile) as error:
        load_trace(str(file))
    assert said in str(error.value)


def test_a_trace_of_ones_own_is_simulated_from_its_file(tmp_path: Path) -> None:
    """Relative to the scenario; also compressed."""
    (tmp_path / "trace.json").write_text(json.dumps([event("a", 1.0), event("a", 2.0, "fault_end")]))
    file = tmp_path / "scenario.yaml"
    file.write_text(GOOD.replace("constant_rate: {per_1000_node_days: 6.5}", "trace: {file: trace.json}"))
    found = load_scenario(file)
    assert found.faults.trace is not None
    assert [one.seconds for one in load_trace(found.faults.trace.file).outages] == [86_400.0]
