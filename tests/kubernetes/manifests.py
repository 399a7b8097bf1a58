"""The manifests that Holdfast ships for Kubernetes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "deployments/kubernetes"


def node_reader() -> list[dict[str, Any]]:
    """Return the objects that let a service account read nodes."""
    return list(yaml.safe_load_all((FOLDER / "node-reader.yaml").read_text()))
