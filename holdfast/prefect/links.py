"""Artifact keys, and links into the Prefect UI. Settings come from the environment and the active profile."""

from __future__ import annotations

from typing import Final, Literal
from urllib.parse import quote

from holdfast.prefect.server import configured, setting

Kind = Literal["flow-run", "task-run", "artifact", "artifact-version", "deployment", "automation"]
"""Pages of the UI. An artifact with all its versions is identified by its key, everything else by its id."""

PAGES: Final[dict[Kind, str]] = {
    "flow-run": "runs/flow-run",
    "task-run": "runs/task-run",
    "artifact": "artifacts/key",
    "artifact-version": "artifacts/artifact",
    "deployment": "deployments/deployment",
    "automation": "automations/automation",
}
CLOUD_API: Final = "https://api.prefect.cloud/api"
CLOUD_UI: Final = "https://app.prefect.cloud"


def job_key(job: str) -> str:
    """Return the artifact key of the job page."""
    return job


def progress_key(job: str) -> str:
    """Return the artifact key of the job's progress bar."""
    return f"{job}-progress"


def incident_key(job: str, number: int) -> str:
    """Return the artifact key of incident *number* of *job*."""
    return f"{job}-incident-{number}"


def ui_link(kind: Kind, id_or_key: object) -> str:
    """Return the URL of a page of the Prefect UI; empty if no server is configured."""
    ui = ui_url()
    return f"{ui}/{PAGES[kind]}/{quote(str(id_or_key), safe='')}" if ui else ""


def ui_url() -> str:
    """Return the URL of the Prefect UI: `PREFECT_UI_URL`, or what Prefect derives from its API URL; empty without a server."""
    if ui := setting("PREFECT_UI_URL"):
        return ui.rstrip("/")
    api = configured().rstrip("/")
    if api.startswith(CLOUD_API):
        return CLOUD_UI + api.removeprefix(CLOUD_API).replace("/accounts/", "/account/").replace("/workspaces/", "/workspace/")
    return api.removesuffix("/api").replace("/api/", "/").rstrip("/")
