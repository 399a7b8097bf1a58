"""What the nodes of a cluster have in common, which each of them is held against. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.probe.readiness.finding import Facts


class Baseline:
    """What most nodes have: where one has something else, it is that one that is to be mended. What is declared goes before that."""

    def __init__(self, facts: Sequence[Facts], declared: Mapping[str, int]) -> None:
        inside = [one for one in facts if not one.away]
        self._declared = declared
        self.torch = _most([(one.torch or {}).get("version") for one in inside])
        self.python = _most([minor((one.probe or {}).get("python")) for one in inside])
        self._gpus = max([len(gpus_of(one) or ()) for one in inside if one.node not in declared], default=0)
        self.driver = _most([(one.gpus or {}).get("driver_version") for one in inside if gpus_of(one)])

    def declared(self, node: str) -> int | None:
        """Return how many GPUs *node* has by the cluster file; None where that does not say."""
        return self._declared.get(node)

    def gpus_for(self, node: str) -> tuple[int, str]:
        """Return how many GPUs *node* should have, and who says so: the cluster file, or the nodes of which it says nothing."""
        declared = self.declared(node)
        return (self._gpus, "other nodes have") if declared is None else (declared, "the cluster file says")


def _most(values: Sequence[Any]) -> Any:  # noqa: ANN401 (whatever is counted)
    counted = Counter(value for value in values if isinstance(value, str))
    return counted.most_common(1)[0][0] if counted else None


def minor(version: object) -> str | None:
    """Return the first two numbers of a version of Python."""
    return ".".join(version.split(".")[:2]) if isinstance(version, str) else None


def gpus_of(one: Facts) -> list[dict[str, Any]] | None:
    """Return a node's GPUs as NVML told them; None where it did not."""
    gpus = (one.gpus or {}).get("gpus")
    return gpus if isinstance(gpus, list) else None
