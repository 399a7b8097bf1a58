"""`holdfast node check --cluster CLUSTER_FILE`: real SSH servers, changes since the last check, and every invalid file with its cure."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from holdfast.cluster.local import LocalNodes
from holdfast.paths import cluster_directory
from tests.cli.conftest import Command, described, environment
from tests.cli.terminal import Terminal
from tests.mentions import mentions
from tests.ssh.conftest import Site
from tests.waiting import wait_until


def test_nodes_over_ssh_are_checked_and_changes_are_shown(here: Command, site: Site, tmp_path: Path) -> None:
    """A node that is off is unreachable, one with an unknown key is unknown, and neither is reported twice."""
    site.node("well")
    off = site.node("off")
    site.node("strange", known=False)
    name = described(site, tmp_path, failure_threshold=1)
    first = here("node", "check", "--cluster", name, "--json")
    output = {one["node"]: one for one in json.loads(first.stdout)["nodes"]}
    assert output["strange"]["health"] == "unknown"
    assert "unknown host key" in output["strange"]["reason"]
    assert output["well"]["health"] == output["off"]["health"], "both are this machine"
    assert output["well"]["health"] in {"healthy", "degraded", "unhealthy"}

    off.stop()
    done = here("node", "check", "--cluster", name)
    assert done.returncode == 1
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    assert "unreachable" in rows["off"]
    assert "Connection refused" in rows["off"]
    assert "off: " in done.stdout.partition("Changed since the last check:")[2]
    assert "strange: " not in done.stdout.partition("Changed since the last check:")[2]

    assert done.stdout.count("(last seen ") >= len(output["off"]["evidence"]), "what it was found with before it fell silent is of then"
    listed = json.loads(here("node", "ls", "--cluster", name, "--json").stdout)
    assert {(one["status"], one["agent"]) for one in listed["nodes"]} == {(None, None)}, "no agent is there to be asked"
    health = {one["name"]: one["health"]["status"] for one in listed["nodes"]}
    assert health == {"well": output["well"]["health"], "off": "unreachable", "strange": "unknown"}


def test_nodes_of_this_machine_are_checked_once(here: Command, tmp_path: Path) -> None:
    """All have the same findings; one that is switched off does not answer."""
    (tmp_path / "cluster.yaml").write_text("name: small\nnodes: 3\n")
    LocalNodes("small", cluster_directory("small"), 3).power_off("node-2")
    output = json.loads(here("node", "check", "--cluster", "cluster.yaml", "--json").stdout)
    health = {one["node"]: one["health"] for one in output["nodes"]}
    assert health["node-0"] == health["node-1"] != "unreachable"
    assert health["node-2"] == "unreachable"
    assert output["nodes"][0]["unknown"] == output["nodes"][1]["unknown"]
    assert here("node", "check", "--cluster", "cluster.yaml", "--json").returncode == 1
    assert "unreachable" in here("node", "ls", "--cluster", "cluster.yaml").stdout


def test_a_first_check_shows_no_changes(here: Command, tmp_path: Path) -> None:
    """Without an earlier check nothing has changed."""
    (tmp_path / "cluster.yaml").write_text("name: small\nnodes: 2\n")
    LocalNodes("small", cluster_directory("small"), 2).power_off("node-1")
    first = here("node", "check", "--cluster", "cluster.yaml").stdout
    assert "New since the look before" not in first
    assert "Checked for the first time: " in first
    assert first.count("node-1") == 2, "its row, and the list of new nodes"


def test_evidence_is_folded_where_the_terminal_ends() -> None:
    """Its end is the cure, and must not be cut off; a second finding has a line of its own."""
    rows = [["w1", "unhealthy", "bad: " + "word " * 12 + "cure\nsecond: thing"], ["w2", "healthy", "-"]]
    program = f"from holdfast.cli.output import echo_table; echo_table(('NODE', 'VERDICT', 'EVIDENCE'), {rows}, coloured=1, last='wrapped')"
    with Terminal([sys.executable, "-c", f"import sys; sys.stdin.readline(); {program}"], environment(), columns=50) as terminal:
        terminal.type("\n")
        wait_until(lambda: "w2" in terminal.text, seconds=60, explain=lambda: terminal.raw)
        lines = [line.rstrip("\r") for line in terminal.text.strip().splitlines()]
    first = next(number for number, line in enumerate(lines) if line.startswith("w1"))
    assert all(len(line) <= 50 for line in lines)
    body = " ".join(line[lines[first].index("bad:") :].strip() for line in lines[first:-1])
    assert body.split() == rows[0][2].split()
    assert lines[-2].split() == ["second:", "thing"]


BASE = "kind: ssh\nhosts: [{name: a, address: 127.0.0.1, port: 1}, {name: b, address: 127.0.0.1, port: 2}]\n"
REFUSED = {
    "no cluster": ("name: x\nscript: train.py\n", "describes a job, not a cluster", "Name a cluster's file"),
    "no hosts": ("kind: ssh\n", "hosts: is missing", "Add it"),
    "no such kind": ("kind: kubernetes\n", "no kind of cluster is called 'kubernetes'", "This version knows: local, ssh, slurm"),
    "a shell's word": (BASE + "python: 'python3; reboot'\n", "is not allowed here", "a shell reads it"),
    "key that is not there": (BASE + "key: gone\n", "the private key", "there is no such file. Correct `key`"),
    "key that cannot be read": (BASE + "key: .\n", "Is a directory", "Fix its permissions"),
    "key that is none": (BASE + "key: cluster.yaml\n", "it is no private key", "Name the private half"),
    "known_hosts that is not there": (BASE + "known_hosts: gone\n", "the known_hosts file", "Correct `known_hosts`"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_invalid_cluster_file_is_reported_with_the_cure(case: str, here: Command, tmp_path: Path) -> None:
    """What, where, and what to do; status 2, and nothing is kept."""
    text, reason, cure = REFUSED[case]
    (tmp_path / "cluster.yaml").write_text(text)
    done = here("node", "check", "--cluster", "cluster.yaml")
    assert done.returncode == 2
    assert reason in done.stderr
    assert cure in done.stderr
    assert done.stdout == ""


UNSEEN = {
    "name that does not resolve": (
        "kind: ssh\nhosts: [no-such-host.invalid]\n",
        "no-such-host.invalid does not resolve",
        "`~/.ssh/config`, which is not read",
    ),
    "ports that refuse": (BASE, "all 2 nodes failed at once, so our own network is suspect", "Connection refused"),
}


@pytest.mark.parametrize("case", UNSEEN)
def test_nodes_that_cannot_be_checked_are_unknown(case: str, here: Command, tmp_path: Path) -> None:
    """And not unhealthy; the exit status is 1, as their health is unknown."""
    text, reason, more = UNSEEN[case]
    (tmp_path / "cluster.yaml").write_text(text + "failure_threshold: 1\n")
    done = here("node", "check", "--cluster", "cluster.yaml")
    assert done.returncode == 1
    assert "unknown" in done.stdout
    assert reason in done.stdout
    assert more in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["node-0", "--local"], "name no nodes"), (["--cluster", "cluster.yaml", "--baseline", "x"], "belongs to `--local`")],
)
def test_conflicting_options_are_refused(arguments: list[str], words: str, here: Command) -> None:
    """Before anything is checked."""
    done = here("node", "check", *arguments)
    assert done.returncode == 2
    assert words in done.stderr


@pytest.mark.parametrize("verb", ["validate", "run"])
def test_a_job_on_other_machines_names_the_folder_that_they_share(verb: str, here: Command, tmp_path: Path) -> None:
    """What lies on this machine is not theirs: a script need not be here, checkpoints cannot be."""
    (tmp_path / "job.yaml").write_text("name: a\nscript: train.py\ncluster: {kind: ssh, hosts: [gpu-1, gpu-2]}\n")
    done = here(verb, "job.yaml")
    assert done.returncode == 2
    assert mentions(done.stderr, "checkpoint.directory", "all nodes share")


def test_a_job_that_cannot_run_on_the_cluster_is_refused_before_its_hosts_are_inspected(here: Command, tmp_path: Path) -> None:
    """As `holdfast run` refuses it: a host may be ready, but for what would not start there."""
    (tmp_path / "cluster.yaml").write_text(BASE)
    (tmp_path / "job.yaml").write_text("name: a\nscript: train.py\n")
    done = here("node", "preflight", "--cluster", "cluster.yaml", "--job", "job.yaml")
    assert done.returncode == 2
    assert "checkpoint.directory: the nodes are other machines, and no folder is named" in done.stderr
    assert done.stdout == ""
