"""What an operator copies from deployments/ names programs, options and settings that there are."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from docs.generate import VARIABLES

ROOT = Path(__file__).parents[1]
SYSTEMD = ROOT / "deployments" / "systemd"
COMPOSE = yaml.safe_load((ROOT / "deployments" / "compose" / "compose.yaml").read_text())
UNITS = sorted(SYSTEMD.glob("*.service"))
BIN = "/opt/holdfast/bin/"


def starts(unit: Path) -> Iterator[list[str]]:
    """Yield the commands of *unit*, in words."""
    for line in unit.read_text().splitlines():
        if line.startswith("ExecStart="):
            yield shlex.split(line.removeprefix("ExecStart="))


def every_start() -> list[list[str]]:
    """Return each command of ours that is started anywhere."""
    ours = [words for unit in UNITS for words in starts(unit) if words[0].startswith(BIN)]
    ours += [list(one["command"]) for one in COMPOSE["services"].values() if "command" in one and one["command"][0] == "prefect"]
    script = (ROOT / "deployments" / "slurm" / "orchestrator.sbatch").read_text()
    ours += [shlex.split(line.rstrip("& ")) for line in script.splitlines() if line.startswith("holdfast ")]
    return ours


def settings() -> set[str]:
    """Return the names of all settings that anything is given."""
    text = [path.read_text() for path in (ROOT / "deployments").rglob("*") if path.is_file() and path.suffix != ".md"]
    return {name for one in text for name in re.findall(r"\b(?:HOLDFAST|PREFECT)_[A-Z_]+\b", one)}


def test_every_command_that_is_started_has_the_options_it_is_given() -> None:
    """Each is asked for its help, in the environment that it would run in."""
    asked = dict[tuple[str, ...], set[str]]()
    for words in every_start():
        program, verbs = Path(words[0]).name, [word for word in words[1:4] if re.fullmatch(r"[a-z]+", word)]
        verbs = verbs[:1] if program == "holdfast" else verbs[:2]
        asked.setdefault((program, *verbs), set()).update(word for word in words if word.startswith("--"))
    assert set(asked) == {("prefect", "server", "start"), ("prefect", "worker", "start"), ("holdfast", "run")}
    for (program, *verbs), options in asked.items():
        said = subprocess.run([sys.executable, "-m", program, *verbs, "--help"], capture_output=True, text=True, check=True).stdout
        assert options <= set(re.findall(r"--[a-z-]+", said)), (program, verbs)


def test_every_setting_that_is_named_is_one() -> None:
    """Of ours by the page of settings, of Prefect's by Prefect itself."""
    from prefect.settings.legacy import _get_settings_fields  # noqa: PLC0415 (Prefect has no other list of its names)
    from prefect.settings.models.root import Settings  # noqa: PLC0415

    own = {"HOLDFAST_SETTINGS", "PREFECT_AUTH"}  # of our scripts
    assert settings() - own <= set(VARIABLES) | set(_get_settings_fields(Settings))


@pytest.mark.parametrize("unit", sorted(SYSTEMD.iterdir()), ids=lambda unit: unit.name)
def test_systemd_takes_every_unit(unit: Path, tmp_path: Path) -> None:
    """As it lies there, but for the folder of the programs; where systemd is not installed, what it starts is at least there."""
    for one in SYSTEMD.iterdir():
        (tmp_path / one.name).write_text(one.read_text().replace(BIN, f"{Path(sys.executable).parent}/"))
    verifier = shutil.which("systemd-analyze")
    if verifier is None:
        assert all(Path(words[0]).exists() for words in starts(tmp_path / unit.name))
        return
    done = subprocess.run([verifier, "verify", "--man=no", str(tmp_path / unit.name)], capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if unit.stem.rstrip("@") in line]) == (0, [])


def test_the_compose_file_fits_together() -> None:
    """What depends on a service, a volume or a variable finds it."""
    services, volumes = COMPOSE["services"], COMPOSE["volumes"]
    assert {"postgres", "prefect-server", "deploy", "worker-1", "worker-2"} == set(services)
    for name, one in services.items():
        assert set(one.get("depends_on", {})) <= set(services), name
        for volume in one.get("volumes", []):
            source = volume.split(":")[0]
            assert source in volumes or source == "./ssh" or (ROOT / "deployments" / "compose" / source).exists(), name
    asked = set(re.findall(r"\$\{(\w+)", (ROOT / "deployments" / "compose" / "compose.yaml").read_text()))
    given = set(re.findall(r"^(\w+)=", (ROOT / "deployments" / "compose" / "example.env").read_text(), re.MULTILINE))
    assert asked == given
    worker = services["worker-1"]["environment"]
    assert worker["HOLDFAST_HISTORY"].startswith("postgresql://holdfast:")
    assert services["prefect-server"]["environment"]["PREFECT_API_DATABASE_CONNECTION_URL"].endswith("@postgres/prefect")
    assert "CREATE DATABASE prefect" in (ROOT / "deployments" / "compose" / "databases.sql").read_text()


def test_the_script_for_slurm_is_one() -> None:
    """Bash takes it, and what it asks of sbatch stands in its head."""
    script = ROOT / "deployments" / "slurm" / "orchestrator.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "#SBATCH --requeue" in script.read_text()
