"""`holdfast node trust`: real SSH servers show their keys, which become known after confirmation."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

from holdfast.errors import NoHostKeys
from tests.cli.conftest import Command, described, environment, refused
from tests.cli.terminal import Terminal
from tests.mentions import mentions, one_line_mentions
from tests.ssh.conftest import Site
from tests.ssh.sshd import key_at
from tests.waiting import wait_until


def fingerprint(site: Site, node: str) -> str:
    """Return the fingerprint of a node's key as OpenSSH prints it."""
    completed = subprocess.run(["ssh-keygen", "-lf", site.nodes[node].key], check=True, capture_output=True, text=True)
    return completed.stdout.split()[1]


def machines(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the JSON record of each machine, by its node."""
    return {one["nodes"][0] if one["is_node"] else "jump": one for one in json.loads(done.stdout)["machines"]}


def test_a_key_is_added_after_confirmation(site: Site, tmp_path: Path, holdfast_home: Path) -> None:
    """The fingerprint is the one on the machine's console; the file is private, and OpenSSH reads it."""
    node = site.node("one", known=False)
    site.known_hosts.unlink()
    described(site, tmp_path)
    command = [sys.executable, "-m", "holdfast", "node", "trust", "--cluster", str(tmp_path / "cluster.yaml")]
    with Terminal(command, environment(), columns=200) as terminal:
        wait_until(lambda: "[y/N]" in terminal.text, seconds=60, explain=lambda: terminal.raw)
        assert fingerprint(site, "one") in terminal.text
        assert "unknown" in terminal.text
        assert not site.known_hosts.exists(), "nothing is trusted before they agree"
        terminal.type("y\n")
        wait_until(lambda: terminal.status() is not None, seconds=60, explain=lambda: terminal.raw)
        assert terminal.status() == 0, terminal.text
    assert stat.S_IMODE(site.known_hosts.stat().st_mode) == 0o600
    found = subprocess.run(["ssh-keygen", "-F", f"[{node.address}]:{node.port}", "-f", site.known_hosts], capture_output=True, check=False)
    assert found.returncode == 0
    with Terminal(command, environment(), columns=200) as terminal:
        wait_until(lambda: terminal.status() is not None, seconds=60, explain=lambda: terminal.raw)
        assert "The machine is trusted." in terminal.text
        assert terminal.status() == 0


def test_without_a_terminal_no_key_is_added(here: Command, site: Site, tmp_path: Path) -> None:
    """Keys are shown and not added; `--yes` adds them, after a last line without a newline; health checks work then."""
    site.node("one", known=False)
    site.node("two", known=False)
    site.known_hosts.write_text("# mine")
    name = described(site, tmp_path)
    asked = here("node", "trust", "--cluster", name)
    assert asked.returncode == 1
    assert mentions(asked.stderr, "2 keys", "terminal")
    assert mentions(asked.stdout, "0 of 2")
    assert site.known_hosts.read_text() == "# mine"
    one = here("node", "trust", "--cluster", name, "one", "--yes", "--json")
    assert (one.returncode, list(machines(one))) == (0, ["one"])
    assert machines(one)["one"]["added"]
    assert machines(one)["one"]["fingerprint"] == fingerprint(site, "one")
    assert site.known_hosts.read_text().startswith("# mine\n[")
    output = {look["node"]: look for look in json.loads(here("node", "check", "--cluster", name, "--json").stdout)["nodes"]}
    assert "unknown host key" in output["two"]["reason"]
    assert output["one"]["health"] != "unknown"


def test_a_changed_key_is_never_added(here: Command, site: Site, tmp_path: Path) -> None:
    """It may be an attack."""
    node = site.node("one")
    node.stop()
    node.key.unlink()
    node.key = key_at(node.place / "host_key")
    node.start()
    before = site.known_hosts.read_text()
    done = here("node", "trust", "--cluster", described(site, tmp_path), "--yes")
    assert done.returncode == 1
    assert "changed host key: " in done.stdout
    assert f"ssh-keygen -R '[{node.address}]:{node.port}'" in done.stdout
    assert site.known_hosts.read_text() == before


def test_jump_hosts_come_first_and_then_what_lies_behind(here: Command, site: Site, tmp_path: Path) -> None:
    """No connection goes through an untrusted machine."""
    gate, inner = site.node("gate", known=False), site.node("inner", known=False)
    hosts = [{"name": "inner", "address": inner.address, "port": inner.port}]
    name = described(site, tmp_path, hosts=hosts, jump=[f"{gate.address}:{gate.port}"])
    asked = here("node", "trust", "--cluster", name, "--json")
    found = {one: (state["status"], state["trusted"]) for one, state in machines(asked).items()}
    assert found == {"jump": ("unknown", False), "inner": (None, False)}
    assert "unknown host key" in machines(asked)["inner"]["reason"]
    assert (asked.returncode, gate.logins()) == (1, 0)
    done = here("node", "trust", "--cluster", name, "--yes", "--json")
    assert done.returncode == 0
    assert all(state["trusted"] and state["added"] for state in machines(done).values())
    assert inner.logins() == 0, "a key is shown before anybody logs in"


def test_untrustworthy_keys_are_reported_with_the_cure(here: Command, site: Site, tmp_path: Path) -> None:
    """A node that is off, clones with one key, an unwritable file, an unknown name, nodes without keys."""
    one, clone, off = site.node("one"), site.node("clone", known=False), site.node("off", known=False)
    off.stop()
    clone.stop()
    shutil.copy(one.key, clone.key)
    shutil.copy(one.key.with_suffix(".pub"), clone.key.with_suffix(".pub"))
    clone.start()
    done = here("node", "trust", "--cluster", described(site, tmp_path))
    assert done.returncode == 1
    assert "Connection refused" in done.stdout
    assert one_line_mentions(done.stdout, f"{one.address}, {clone.address}", "same key")
    (tmp_path / "file").touch()
    unwritable = here("node", "trust", "--cluster", described(site, tmp_path, known_hosts=str(tmp_path / "file" / "known")), "--yes")
    assert (unwritable.returncode, unwritable.stdout) == (2, "")
    assert "the known_hosts file" in unwritable.stderr
    assert "Not a directory" in unwritable.stderr
    done = here("node", "trust", "--cluster", described(site, tmp_path), "tow")
    assert (done.returncode, "'tow'" in done.stderr) == (2, True)
    (tmp_path / "local.yaml").write_text("nodes: 2\n")
    assert refused(here("node", "trust", "--cluster", "local.yaml"), NoHostKeys("local", "local"))
