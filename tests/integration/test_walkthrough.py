"""What docs/how-to/prefect-deployments.md describes works as it stands there: in a fresh clone, with server, worker and Chromium."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright
from playwright.sync_api import TimeoutError as PlaywrightTimeout

from holdfast.host.ports import free_port
from tests.integration.conftest import answers
from tests.integration.prefect_api import ask
from tests.integration.test_deployment import errors_in
from tests.mentions import one_line_mentions
from tests.waiting import wait_until

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/prefect-deployments.md").read_text()
STEPS = re.findall(r"```bash\n(.*?)```", PAGE.partition("## Step by step")[2].partition("\n## ")[0], re.DOTALL)
CHROMIUM = "/usr/bin/chromium"
QUIET = [f"--{word}" for word in ("no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking")]
PATIENCE = 120_000
"""Milliseconds that a page may take on a busy machine."""


@dataclass
class Reader:
    """Somebody with an environment, a clone and some terminals."""

    clone: Path
    place: Path
    port: int
    environment: dict[str, str]
    terminals: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def on_our_port(self, commands: str) -> str:
        """Return *commands* for a server that is not at the usual port, where somebody may have one."""
        return commands.replace("4200", str(self.port))

    def types(self, commands: str) -> str:
        """Run commands to their end; return what they said."""
        command, nothing = ["bash", "-euc", self.on_our_port(commands)], subprocess.DEVNULL
        done = subprocess.run(command, cwd=self.clone, env=self.environment, capture_output=True, text=True, stdin=nothing, check=False)
        assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}\n{self.log(1)[-3000:]}"
        return done.stdout

    def opens_a_terminal(self, commands: str, until: str) -> None:
        """Start commands that stay in the foreground, and wait *until* they say so."""
        number = len(self.terminals)
        with (self.place / f"terminal-{number}.log").open("wb") as out:
            command = ["bash", "-euc", self.on_our_port(commands)]
            self.terminals.append(
                subprocess.Popen(
                    command, cwd=self.clone, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
                )
            )
        terminal = self.terminals[-1]
        wait_until(lambda: until in self.log(number) or terminal.poll() is not None, seconds=240, explain=lambda: self.log(number))
        assert terminal.poll() is None, self.log(number)

    def log(self, terminal: int) -> str:
        """Return what a terminal shows."""
        log = self.place / f"terminal-{terminal}.log"
        return log.read_text() if log.exists() else ""

    def leaves(self) -> None:
        """Close all terminals."""
        for terminal in self.terminals:
            with suppress(ProcessLookupError):
                os.killpg(terminal.pid, signal.SIGKILL)
            terminal.wait()


@pytest.fixture
def reader(tmp_path_factory: pytest.TempPathFactory, prefect_database: Path) -> Iterator[Reader]:
    """Give a newcomer with a clone of what is in the working tree, and an environment in which Holdfast is installed."""
    place, port = tmp_path_factory.mktemp("reader"), free_port()
    clone, tools, prefect_home = place / "holdfast", place / "bin", place / "prefect"
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()]  # a checkout without its .git is one too
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(".git", *ignored))
    tools.mkdir()
    prefect_home.mkdir()
    shutil.copy(prefect_database, prefect_home)  # migrated already, which takes a fresh one long
    for name in ("prefect", "holdfast"):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {name} "$@"\n')
        (tools / name).chmod(0o755)
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "HOLDFAST_"))}
    environment = bare | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(clone),
        "HOLDFAST_MEMSTORE_ROOT": os.environ["HOLDFAST_MEMSTORE_ROOT"],
        "HOLDFAST_KERNEL_LOG": os.environ["HOLDFAST_KERNEL_LOG"],
        "HOLDFAST_HOME": str(place / "home"),
        "PREFECT_HOME": str(prefect_home),
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PREFECT_CLI_COLORS": "false",
        "COLUMNS": "160",
        "DO_NOT_TRACK": "1",
    }
    reader = Reader(clone, place, port, environment)
    yield reader
    reader.leaves()


@pytest.fixture
def page() -> Iterator[Page]:
    """Give a page of the system's Chromium."""
    if not Path(CHROMIUM).exists():
        pytest.skip(f"{CHROMIUM} is not installed: scripts/system_packages.sh does it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        page = browser.new_page(viewport={"width": 1300, "height": 1400})
        page.set_default_timeout(PATIENCE)
        yield page
        browser.close()


@pytest.mark.timeout(900)  # a minute and a quarter on a quiet machine, in a dozen processes that each import Prefect
def test_a_newcomer_follows_the_page_from_nothing_to_a_trained_job(reader: Reader, page: Page) -> None:
    """Server, pool, deployments, worker; a job from the form, one from the command line; schedules; a cluster that Prefect keeps."""
    server, worker, command_line, schedules, own_cluster = STEPS
    reader.opens_a_terminal(server, until="Check out the dashboard")
    wait_until(lambda: answers(f"http://127.0.0.1:{reader.port}/api"), seconds=60, explain=lambda: reader.log(0))
    reader.opens_a_terminal(worker, until="started!")
    fill_in_the_form(page, f"http://127.0.0.1:{reader.port}", f"{reader.clone}/examples/byte_gpt.py --steps 20")

    runs = ask(f"http://127.0.0.1:{reader.port}/api/flow_runs/filter", {"deployments": {"name": {"any_": ["train"]}}})
    assert len(runs) == 1, "a press that is made again starts no second run"

    said = reader.types(command_line)
    assert one_line_mentions(said, "successfully", "'Completed'")
    assert "hello-cli  COMPLETED" in said
    address, _, _ = command_line.partition("\n")
    coming = reader.types(f"{address}\n{schedules}")
    assert "cluster-health" in coming
    assert "node-repair" in coming
    said = reader.types(f"{address}\n{own_cluster}")
    assert one_line_mentions(said, "successfully", "'Completed'")
    assert errors_in(reader.log(0)) == []
    assert f'File "{reader.clone}' not in reader.log(1), "a traceback through Holdfast"


def fill_in_the_form(page: Page, address: str, script: str) -> None:
    """Open the deployment in the UI, make a mistake in the form, mend it, submit, and watch the job train to its end."""
    page.goto(address)
    page.get_by_role("link", name="Deployments").click()
    page.get_by_role("link", name="train", exact=True).click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Custom run").click()
    name, submit = page.get_by_role("textbox", name="Name", exact=True), page.get_by_role("button", name="Submit")
    name.fill("Bad Name")
    expect(page.get_by_role("textbox")).to_have_count(6)  # the run's own name and five fields: nothing of *advanced*
    submit.click()
    expect(page.get_by_text("'lowercase letters, digits and dashes, at most 63' was expected").first).to_be_visible(timeout=PATIENCE)
    expect(page.get_by_text("'script' is a required property").first).to_be_visible(timeout=PATIENCE)

    page.reload()  # with what is wrong still on the page, Prefect's UI starts the run at the second press, or at the first one
    expect(page.get_by_role("spinbutton").first).to_have_value("1", timeout=PATIENCE)  # the defaults have come: they overwrite nothing now
    name.fill("hello")
    line = page.get_by_role("textbox", name="Script or command")
    line.fill(script)
    expect(name).to_have_value("hello")
    expect(line).to_have_value(script)
    submit.click()
    started = re.compile(r"/deployment/[^/]*$")
    try:
        page.wait_for_url(started, wait_until="commit", timeout=PATIENCE / 3)  # the page changes without being loaded anew
    except PlaywrightTimeout:  # Prefect's UI loses a press that comes while it still checks the form: it has started no run, see below
        submit.click()
        page.wait_for_url(started, wait_until="commit")
    page.locator('a[href*="/runs/flow-run/"]').first.click()
    page.wait_for_url(re.compile(r"/runs/flow-run/"), wait_until="commit")
    expect(page.get_by_text("train hello").first).to_be_visible(timeout=PATIENCE)
    expect(page.get_by_text("Completed", exact=True).first).to_be_visible(timeout=PATIENCE)
