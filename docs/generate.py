"""Write the generated pages of docs/: `python -m docs.generate`, or `make docs`, which then builds the site."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from docs.generator.api import api_page
from docs.generator.calibration import calibration_picture
from docs.generator.cli import cli_page, exit_codes_page
from docs.generator.conformance import conformance_page
from docs.generator.environment import environment_page
from docs.generator.events import events_page
from docs.generator.faults import fault_pages
from docs.generator.fields import cluster_file_page, job_file_page, policy_file_page, scenario_file_page
from docs.generator.metrics import metrics_page
from docs.generator.protocol import protocol_page
from docs.generator.states import states_page
from docs.generator.torch_versions import torch_versions_page
from holdfast.spec.json_schemas import FOLDER, SCHEMAS, text_of

DOCS: Final = Path(__file__).parent

PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "reference/cli.md": cli_page,
    "reference/exit-codes.md": exit_codes_page,
    "reference/job-file.md": job_file_page,
    "reference/cluster-file.md": cluster_file_page,
    "reference/policy-file.md": policy_file_page,
    "reference/scenario-file.md": scenario_file_page,
    "reference/environment-variables.md": environment_page,
    "reference/python-api.md": api_page,
    "reference/events.md": events_page,
    "reference/metrics.md": metrics_page,
    "reference/states.md": states_page,
    "reference/protocol.md": protocol_page,
    "reference/conformance.md": conformance_page,
    "reference/torch-versions.md": torch_versions_page,
    "assets/calibration.svg": calibration_picture,
    **fault_pages(),
}
"""Generated page, by its path below docs/, to what draws it."""


def main() -> None:
    """Write every page and JSON Schema that differs, and delete pages of components that the catalogue no longer has."""
    for kind in SCHEMAS:
        file, text = FOLDER / f"{kind}.json", text_of(kind)
        if not file.exists() or file.read_text() != text:
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
            print(f"holdfast/spec/schemas/{file.name} written")
    for name, draw in PAGES.items():
        page, text = DOCS / name, draw()
        if not page.exists() or page.read_text() != text:
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(text)
            print(f"docs/{name} written")
    for page in (DOCS / "reference/faults").glob("*.md"):
        if str(page.relative_to(DOCS)) not in PAGES:
            page.unlink()
            print(f"docs/{page.relative_to(DOCS)} deleted: no fault kind has this component")


if __name__ == "__main__":
    main()
