"""Every YAML block that a page shows is a file that Holdfast loads."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from holdfast.errors import BadFile
from holdfast.simulator.scenario import load_scenario
from holdfast.spec.files.load import load_cluster, load_job
from holdfast.spec.policy import load_policy

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(page for top in ("docs", "deployments", "examples") for page in (ROOT / top).rglob("*.md"))])
FENCE = re.compile(r"^( *)```yaml\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
LOADERS: dict[str, Callable[[Path], object]] = {
    "job.yaml": load_job,
    "cluster.yaml": load_cluster,
    "policy.yaml": load_policy,
    "scenario.yaml": load_scenario,
}
FOREIGN = {"prometheus.yml", "node-reader.yaml", "pod.yaml"}
"""Files of other programs."""
NEEDED = {"name": "from-a-page", "script": "train.py"}
"""What a part of a job file leaves out."""
INCLUDED = re.compile(r'--8<-- "(.+\.yaml)"\n')
"""A block that shows a file of the repository."""


def blocks() -> list[tuple[str, str]]:
    """Return the YAML blocks of all pages, each with its place."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for block in FENCE.finditer(text):
            line = text.count("\n", 0, block.start()) + 2
            shown = re.sub(f"^{block[1]}", "", block[2], flags=re.MULTILINE)
            if file := INCLUDED.fullmatch(shown):
                shown = (ROOT / file[1]).read_text()
            found.append((f"{page.relative_to(ROOT)}:{line}", shown))
    return found


def kind(text: str) -> str:
    """Return the name of the file that the fields of *text* belong into."""
    fields = yaml.safe_load(text).keys()
    if "faults" in fields:
        return "scenario.yaml"
    return "cluster.yaml" if "kind" in fields else "policy.yaml" if fields & {"based_on", "recommended_actions"} else "job.yaml"


def load(text: str, folder: Path) -> None:
    """Load a block as the file that its first line names; an example's own first line names none."""
    name = text.partition("\n")[0].removeprefix("# ").split()[0]
    name = name if name in LOADERS or name in FOREIGN else kind(text)
    if name in FOREIGN:
        assert isinstance(yaml.safe_load(text), dict)
        return
    if name == "job.yaml":
        fields = yaml.safe_load(text)
        missing = [field for field in NEEDED if field not in fields and not (field == "script" and {"command", "module"} & fields.keys())]
        text += "".join(f"{field}: {NEEDED[field]}\n" for field in missing)
    file = folder / name
    file.write_text(text)
    LOADERS[name](file)


@pytest.mark.parametrize(("place", "text"), blocks(), ids=[place for place, _ in blocks()])
def test_a_block_of_yaml_on_a_page_is_a_file_that_loads(place: str, text: str, tmp_path: Path) -> None:
    """A reader who copies it gets no error; its first line says which file it is or is part of."""
    assert re.match(r"# \S+", text), f"{place}: begin the block with the name of the file: `# job.yaml`, `# cluster.yaml`, `# policy.yaml`"
    load(text, tmp_path)


def test_the_check_finds_blocks_and_refuses_wrong_ones(tmp_path: Path) -> None:
    """It reads blocks, indented ones too, and an unknown field fails it."""
    places = {place.partition(":")[0] for place, _ in blocks()}
    assert {"README.md", "docs/how-to/slurm.md", "docs/how-to/policies.md"} <= places
    assert FENCE.findall("- a\n\n    ```yaml\n    # job.yaml\n    ```\n") == [("    ", "    # job.yaml\n")]
    with pytest.raises(BadFile):
        load("# job.yaml\nnodez: 2\n", tmp_path)
    with pytest.raises(BadFile):
        load("# cluster.yaml\nkind: cloud\n", tmp_path)
    with pytest.raises(BadFile):
        load("# policy.yaml\nbased_on: nobody\n", tmp_path)
