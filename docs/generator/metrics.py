"""The page of metrics, from the families that `holdfast admin metrics` writes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from prometheus_client import Metric

from docs.generator.markdown import page, table

GROUPS: Final = (
    ("Jobs", ("holdfast_job",)),
    (
        "Incidents and faults",
        ("holdfast_incident", "holdfast_recover", "holdfast_last", "holdfast_lost", "holdfast_down", "holdfast_fault"),
    ),
    ("Checkpoints and snapshots", ("holdfast_checkpoint", "holdfast_snapshot")),
    ("Nodes and approvals", ("holdfast_node", "holdfast_approvals")),
    ("Holdfast itself", ("holdfast_build", "holdfast_collect")),
)
"""Title of a group to how the names of its metrics begin."""


def families() -> list[Metric]:
    """Return every metric family, from a history without jobs."""
    from holdfast.history.store import History  # noqa: PLC0415 (the other pages do not need it)
    from holdfast.report.metrics.families import collect  # noqa: PLC0415 (as above)

    with tempfile.TemporaryDirectory() as folder:
        history = History.open(f"sqlite:///{Path(folder) / 'history.db'}")
        try:
            return collect(history)
        finally:
            history.close()


def label_values() -> dict[str, str]:
    """Return what each label means, with its values where they are few."""
    from holdfast.accounting.ledger import TimeCategory  # noqa: PLC0415 (as above)
    from holdfast.detectors.catalogue import Area, RecommendedAction  # noqa: PLC0415 (the other pages do not need it)
    from holdfast.policies.nodes.node_health import NodeHealthState  # noqa: PLC0415 (as above)
    from holdfast.policies.recovery.case import RecoveryAction  # noqa: PLC0415 (as above)
    from holdfast.report.metrics.incidents import NO_ACTION, OTHER, OUTCOMES  # noqa: PLC0415 (as above)
    from holdfast.report.phases import KINDS  # noqa: PLC0415 (as above)

    def listed(values: Iterable[str]) -> str:
        return ", ".join(f"`{value}`" for value in values)

    return {
        "action": f"Recovery action: {listed([*RecoveryAction, NO_ACTION])}.",
        "area": f"Area of the fault catalogue: {listed([*Area, OTHER])}.",
        "category": f"How the time was used: {listed(use.value.replace(' ', '_') for use in TimeCategory)}.",
        "cluster": "Name of the cluster.",
        "health": f"Result of the last probe: {listed(NodeHealthState)}.",
        "job": "Name of the training job. Set `honor_labels: true` in the scrape configuration, or Prometheus renames it.",
        "kind": "Fault kind, as in the [fault catalogue](faults/index.md).",
        "node": "Name of the node.",
        "outcome": f"How an incident ended: {listed(OUTCOMES)}.",
        "phase": f"Phase of a recovery: {listed(kind.name for kind in KINDS)}.",
        "recommended_action": f"Recommended action of a fault: {listed(RecommendedAction)}.",
        "run": "Id of the run.",
        "state": "[State](states.md) of a job or a node, in lowercase.",
        "version": "Version of Holdfast.",
    }


def metrics_page() -> str:
    """List every metric with its type, labels and meaning."""
    found, values = families(), label_values()
    parts = [
        "# Metrics\n",
        "`holdfast admin metrics` computes these from the history at each scrape.",
        "[Prometheus and Grafana](../how-to/prometheus-and-grafana.md) shows how to collect them.\n",
        "A job has metrics until seven days after its end. Counters cover all runs with the job's name; gauges describe the newest run.\n",
    ]
    for title, starts in GROUPS:
        rows = [
            (
                f"`{one.name}{'_total' * (one.type == 'counter')}`",
                one.type,
                ", ".join(f"`{label}`" for label in _labels(one)),
                one.documentation,
            )
            for one in found
            if one.name.startswith(starts)
        ]
        parts += [f"## {title}\n", table(("Metric", "Type", "Labels", "Meaning"), *rows)]
    used = sorted({label for one in found for label in _labels(one)})
    parts += ["## Labels\n", table(("Label", "Meaning and values"), *((f"`{label}`", values[label]) for label in used))]
    return page(*parts)


def _labels(family: Metric) -> tuple[str, ...]:
    return tuple(getattr(family, "_labelnames"))  # noqa: B009 (prometheus_client gives an empty family's labels nowhere else)
