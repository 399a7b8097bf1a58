"""What an operator copies from deployments/ names programs, options and settings that there are."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from docs.generator.environment import VARIABLES

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
    ours += [
        list(one["command"]) for one in COMPOSE["services"].values() if "command" in one and one["command"][0] in {"prefect", "holdfast"}
    ]
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
        verbs = verbs[:2] if program == "prefect" or verbs[0] == "admin" else verbs[:1]
        asked.setdefault((program, *verbs), set()).update(word for word in words if word.startswith("--"))
    prefect, ours = (
        {("prefect", "server", "start"), ("prefect", "worker", "start")},
        {("holdfast", "run"), ("holdfast", "admin", "metrics")},
    )
    assert set(asked) == prefect | ours
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


@pytest.fixture
def prefect() -> Iterator[str]:
    """Give the address of something that answers as a healthy server of Prefect does, on an address that is not the usual one."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/api/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.2", 0), Answer) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"127.0.0.2:{server.server_port}"
        server.shutdown()


def test_the_check_asks_where_the_server_listens_and_restarts_only_what_does_not_answer(prefect: str, tmp_path: Path) -> None:
    """By the setting that the server's unit leaves to the site's file; with no program but systemctl and the environment's python."""
    listens, _, port = prefect.partition(":")
    (tmp_path / "systemctl").write_text(f'#!/bin/sh\n[ "$1" = restart ] || exit 0\necho "$2" >>{tmp_path}/restarted\n')
    (tmp_path / "systemctl").chmod(0o755)
    (command,) = [words for words in starts(SYSTEMD / "holdfast-check.service") if "prefect-server" in words[-1]]
    words = [command[0], "-c", command[-1].replace(BIN, f"{Path(sys.executable).parent}/")]
    assert "curl" not in command[-1]

    def restarted(**settings: str) -> list[str]:
        environment = {"PATH": str(tmp_path), "PYTHONPATH": str(ROOT), "PREFECT_SERVER_API_PORT": port, **settings}
        subprocess.run(words, env=environment, check=True, capture_output=True)
        log = tmp_path / "restarted"
        return log.read_text().split() if log.exists() else []

    assert restarted(PREFECT_SERVER_API_HOST=listens) == []
    assert restarted(PREFECT_SERVER_API_HOST="not an address") == [], "nobody could look"
    assert restarted(PYTHONPATH="", PREFECT_SERVER_API_HOST="127.0.0.3", PYTHONHOME="/nowhere") == [], "nobody could look"
    assert restarted(PREFECT_SERVER_API_HOST="127.0.0.3") == ["prefect-server"]
    server = (SYSTEMD / "prefect-server.service").read_text()
    assert "PREFECT_SERVER_API_HOST=127.0.0.1" in server
    assert not [words for words in starts(SYSTEMD / "prefect-server.service") if "--host" in words or "--port" in words]


def test_the_compose_file_fits_together() -> None:
    """What depends on a service, a volume or a variable finds it."""
    services, volumes = COMPOSE["services"], COMPOSE["volumes"]
    assert {"postgres", "prefect-server", "deploy", "worker-1", "worker-2", "metrics"} == set(services)
    assert services["metrics"]["command"][-1].rpartition(":")[2] == services["metrics"]["ports"][0].rpartition(":")[2]
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


def test_no_flow_takes_a_sites_default_of_retries() -> None:
    """Each says `retries=0`: from 3.9.1 on Prefect runs a flow that returned Failed again, and a job that failed for good is not to."""
    marked = {}
    for path in (*ROOT.glob("flows/*.py"), *ROOT.glob("tasks/*.py"), *ROOT.glob("holdfast/**/*.py"), *ROOT.glob("examples/*.py")):
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        for node in functions:
            for mark in node.decorator_list:
                if "flow" in {getattr(mark, "id", ""), getattr(getattr(mark, "func", None), "id", "")}:
                    given = {one.arg: ast.unparse(one.value) for one in getattr(mark, "keywords", [])}
                    marked[f"{path.relative_to(ROOT)}:{node.name}"] = given.get("retries")
    assert {"flows/training_job.py:training_job", "holdfast/prefect_client/approvals.py:approval"} < set(marked)
    assert set(marked.values()) == {"0"}, marked


def test_deployments_are_distinct() -> None:
    """By their names and their tags: the page of a run shows both without the flow's name."""
    ours = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())["deployments"]
    assert len({one["name"] for one in ours}) == len({tuple(one["tags"]) for one in ours}) == len(ours) == 3


def test_the_script_for_slurm_keeps_its_things_in_a_folder_of_its_users(tmp_path: Path) -> None:
    """Anybody may make folders in `$TMPDIR`: one with a name that can be guessed may be somebody else's."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "holdfast").write_text('#!/bin/sh\necho "$HOLDFAST_HOME"\n')
    (tools / "scontrol").write_text("#!/bin/sh\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    home = tmp_path / "me"
    given = {"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(home), "USER": "me", "SLURM_JOB_ID": "1", "TMPDIR": str(tmp_path / "tmp")}
    script = str(ROOT / "deployments" / "slurm" / "orchestrator.sbatch")
    done = subprocess.run(["bash", script, "job.yaml"], env=given, capture_output=True, text=True, check=True, timeout=60)
    assert Path(done.stdout.strip()).is_relative_to(home / ".holdfast")


def test_the_script_for_slurm_is_one() -> None:
    """Bash takes it, and what it asks of sbatch stands in its head."""
    script = ROOT / "deployments" / "slurm" / "orchestrator.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert {"#SBATCH --requeue", "#SBATCH --signal=B:USR1@60"} <= set(script.read_text().splitlines())
