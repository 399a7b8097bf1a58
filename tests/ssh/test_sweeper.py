"""Probes of nodes through real SSH servers: readings, failures of a node, and failures that are no fault of a node."""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from holdfast.cluster.ssh import SshSweeper
from holdfast.detectors.evidence import Unknown
from holdfast.detectors.nodes.probe_result import UnansweredProbe
from holdfast.detectors.nodes.readings import HostReading, NodeReading
from holdfast.errors import UnusableFile
from tests.mentions import mentions
from tests.ssh.conftest import Site
from tests.ssh.sshd import Sshd, key_at
from tests.waiting import wait_until

LONG = 60.0
"""Deadline of a probe that must succeed, on any machine."""
SHORT = 3.0
"""Seconds after which what hangs is given up; a node that is connected answers in a tenth of it."""


def test_nodes_are_probed_over_one_connection(site: Site) -> None:
    """A second sweep logs in nowhere: the same server process and the same collector answer."""
    site.node("a")
    site.node("b")
    sweeper = site.sweeper()
    first = sweeper.sweep(LONG)
    assert list(first) == ["a", "b"]
    for name, look in first.items():
        assert isinstance(look.found, NodeReading), look
        assert look.found.node == name
        assert isinstance(look.found.host, HostReading)

    def alone() -> list[list[int]] | None:
        found = [collectors(node) for node in site.nodes.values()]
        return found if all(len(pids) == 1 for pids in found) else None

    before = wait_until(alone, seconds=60)  # what a look forks is gone in a moment
    second = sweeper.sweep(LONG)
    assert all(isinstance(look.found, NodeReading) for look in second.values())
    assert wait_until(alone, seconds=60) == before
    assert [node.logins() for node in site.nodes.values()] == [1, 1]


def test_a_collector_ends_with_its_connection(site: Site) -> None:
    """No process of ours remains on a node."""
    node = site.node("a")
    sweeper = site.sweeper()
    sweeper.sweep(LONG)
    pids = collectors(node)
    sweeper.close()
    wait_until(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()], seconds=60)


def test_fresh_connections_leave_nothing(site: Site) -> None:
    """Each sweep logs in again where connections are not kept."""
    node = site.node("a")
    sweeper = site.sweeper(keep=False)
    for _ in range(2):
        assert isinstance(sweeper.sweep(LONG)["a"].found, NodeReading)
    assert node.logins() == 2
    wait_until(lambda: not collectors(node), seconds=60)


def test_nodes_behind_jump_hosts_share_one_login_there(site: Site) -> None:
    """Two nodes behind a chain of two: each jump host is logged in to once, and strictly checked too."""
    site.node("outer")
    site.node("inner")
    site.node("a")
    site.node("b")
    jump_hosts = [f"{site.nodes[name].address}:{site.nodes[name].port}" for name in ("outer", "inner")]
    hosts = [{"name": name, "address": site.nodes[name].address, "port": site.nodes[name].port} for name in ("a", "b")]
    sweeper = site.sweeper(hosts=hosts, jump=jump_hosts)
    for _ in range(2):
        looks = sweeper.sweep(LONG)
        assert all(isinstance(look.found, NodeReading) for look in looks.values()), looks
    assert {name: node.logins() for name, node in site.nodes.items()} == {"outer": 1, "inner": 1, "a": 1, "b": 1}


def test_a_node_that_is_off_behind_a_jump_host_does_not_affect_the_others(site: Site) -> None:
    """The jump host's report of a refused connection counts only for the node behind it."""
    jump, off = site.node("jump"), site.node("off")
    site.node("on")
    off.stop()
    looks = site.sweeper(jump=f"{jump.address}:{jump.port}").sweep(LONG)
    assert isinstance(looks["on"].found, NodeReading)
    assert isinstance(looks["off"].found, UnansweredProbe)
    assert f"through {jump.address} port {jump.port}" in looks["off"].found.why


def test_a_jump_host_that_is_off_is_no_fault_of_a_node(site: Site) -> None:
    """What lies behind it cannot be seen."""
    jump = site.node("jump")
    site.node("a")
    jump.stop()
    look = site.sweeper(jump=f"{jump.address}:{jump.port}").sweep(LONG, ["a"])["a"]
    assert isinstance(look.found, Unknown)
    assert mentions(look.found.why, jump.address, f"port {jump.port}")


@pytest.mark.long
def test_a_jump_host_that_hangs_is_no_fault_of_a_node(site: Site) -> None:
    """It is connected and does not answer: after a node behind it was unreachable, it is checked before it is used again."""
    jump = site.node("jump")
    site.node("a")
    sweeper = site.sweeper(jump=f"{jump.address}:{jump.port}")
    assert isinstance(sweeper.sweep(LONG, ["a"])["a"].found, NodeReading)
    sweeper._nodes["a"].cut()
    jump.signal(signal.SIGSTOP)
    look = sweeper.sweep(SHORT, ["a"])["a"]
    assert isinstance(look.found, Unknown), look
    assert mentions(look.found.why, jump.address, f"port {jump.port}")
    jump.signal(signal.SIGCONT)
    wait_until(lambda: isinstance(sweeper.sweep(LONG, ["a"])["a"].found, NodeReading), seconds=LONG)


def test_our_own_lack_of_file_descriptors_is_no_fault_of_a_node(site: Site) -> None:
    """With the cure."""
    site.node("a")
    sweeper = site.sweeper(failure_threshold=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        look = sweeper.sweep(LONG)["a"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert isinstance(look.found, Unknown)
    assert "raise `ulimit -n`" in look.found.why


def test_a_changed_host_key_is_reported_as_such(site: Site) -> None:
    """The message names the file and the cure, and nothing is sent to that server."""
    node = site.node("a", known=False)
    other = key_at(site.place / "other")
    text = node.known.rpartition(" ")[0] + " " + other.with_suffix(".pub").read_text().split()[1] + "\n"
    site.known_hosts.write_text(text)
    found = site.sweeper().sweep(LONG)["a"].found
    assert isinstance(found, Unknown)
    assert "changed host key" in found.why
    assert str(site.known_hosts) in found.why
    assert f"ssh-keygen -R '[{node.address}]:{node.port}'" in found.why
    assert node.logins() == 0
    assert site.known_hosts.read_text() == text


def test_an_unknown_host_key_is_never_added(site: Site) -> None:
    """Not by the second probe either."""
    node = site.node("a", known=False)
    sweeper = site.sweeper()
    for _ in range(2):
        found = sweeper.sweep(LONG)["a"].found
        assert isinstance(found, Unknown)
        assert "unknown host key" in found.why
        assert "`holdfast node trust --cluster CLUSTER_FILE`" in found.why
    assert site.known_hosts.read_text() == ""
    assert node.logins() == 0


def test_the_known_one_of_a_servers_keys_is_requested(site: Site) -> None:
    """The file holds its ECDSA key only; by itself the server would show another one."""
    other = site.place / "other"
    key_at(other, "-t", "ecdsa")
    node = site.node("a", f"HostKey {other}", known=False)
    kind, key = other.with_suffix(".pub").read_text().split()[:2]
    site.known_hosts.write_text(f"[{node.address}]:{node.port} {kind} {key}\n")
    assert isinstance(site.sweeper().sweep(LONG)["a"].found, NodeReading)


def test_a_refused_key_is_reported_with_the_cure(site: Site) -> None:
    """It is no fault of the node."""
    site.node("a")
    found = site.sweeper(key=str(key_at(site.place / "stranger"))).sweep(LONG)["a"].found
    assert isinstance(found, Unknown)
    assert "does not let" in found.why
    assert "authorized_keys" in found.why


def test_without_any_key_the_cure_is_reported(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a file nor an agent: the user's home is empty."""
    site.node("a")
    monkeypatch.setenv("HOME", str(site.place / "empty"))
    found = site.sweeper(key=None).sweep(LONG)["a"].found
    assert isinstance(found, Unknown)
    assert mentions(found.why, "no key")
    assert "ssh-add" in found.why


def test_keys_of_the_ssh_agent_and_of_the_home_folder_work(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with OpenSSH's own client, the user names nothing."""
    site.node("a")
    home = site.place / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh/id_ed25519").write_bytes(site.key.read_bytes())
    (home / ".ssh/known_hosts").write_bytes(site.known_hosts.read_bytes())
    monkeypatch.setenv("HOME", str(home))
    assert isinstance(site.sweeper(key=None, known_hosts=None).sweep(LONG)["a"].found, NodeReading)


def test_a_node_without_the_interpreter_is_reported(site: Site) -> None:
    """Not a miss: it let us in."""
    site.node("a")
    found = site.sweeper(python="/nowhere/python3").sweep(LONG)["a"].found
    assert isinstance(found, Unknown)
    assert "/nowhere/python3" in found.why
    assert mentions(found.why, "interpreter")


def test_an_address_that_does_not_resolve_is_reported(site: Site) -> None:
    """It is our own error, and no failure of the node."""
    site.known_hosts.touch()
    found = site.sweeper(hosts=[{"name": "a", "address": "no-such-host.invalid"}]).sweep(LONG)["a"].found
    assert isinstance(found, Unknown)
    assert mentions(found.why, "no-such-host.invalid")


def test_a_server_that_hangs_times_out(site: Site) -> None:
    """The kernel accepts the connection, and no server answers; a login that hangs in the middle is the same. The others are probed."""
    hung = site.node("hung")
    site.node("well")
    sweeper = site.sweeper(failure_threshold=2)
    sweeper.sweep(LONG, ["well"])
    hung.signal(signal.SIGSTOP)
    looks = sweeper.sweep(2 * SHORT)
    assert isinstance(looks["well"].found, NodeReading)
    assert isinstance(looks["hung"].found, UnansweredProbe), looks
    assert looks["hung"].found.times == 2
    assert mentions(looks["hung"].found.why, "SSH handshake")
    hung.signal(signal.SIGCONT)
    assert isinstance(sweeper.sweep(LONG)["hung"].found, NodeReading)


@pytest.mark.long
def test_a_connection_that_hangs_after_the_login_times_out(site: Site) -> None:
    """Its server is stopped between two probes; so is a new connection."""
    hung = site.node("hung")
    site.node("well")
    sweeper = site.sweeper(failure_threshold=1)
    sweeper.sweep(LONG)
    hung.signal(signal.SIGSTOP)
    looks = sweeper.sweep(SHORT)
    assert isinstance(looks["well"].found, NodeReading)
    assert isinstance(looks["hung"].found, UnansweredProbe), "that it let us in before proves nothing of now"
    hung.signal(signal.SIGCONT)
    assert isinstance(sweeper.sweep(LONG)["hung"].found, NodeReading)


def script(site: Site, text: str) -> str:
    """Return the path of a program in place of the nodes' interpreter."""
    path = site.place / "odd"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("exec sleep 1000", "gave no reading in time"),
        ("while :; do echo noise; sleep 0.01; done", "gave no reading in time (noise)"),
        ("exec cat /dev/zero", "more than 4 MiB without a valid reading"),
        ("echo 'Welcome to gpu-17'; exit 3", "exited with status 3 and gave no reading (Welcome to gpu-17)"),
        ("echo 'cannot allocate memory' >&2; exit 1", "(cannot allocate memory)"),
        ("kill -9 $$", "was killed and gave no reading"),
    ],
    ids=["hangs", "endless lines", "flood", "banner", "complaint", "killed"],
)
def test_an_interpreter_that_sends_no_reading_is_reported(site: Site, text: str, why: str) -> None:
    """The login proves that the node is up: this does not count as unreachable."""
    site.node("a")
    found = site.sweeper(python=script(site, text)).sweep(SHORT if "in time" in why else LONG)["a"].found
    assert isinstance(found, Unknown), found
    assert why in found.why


def test_output_before_the_answer_is_skipped(site: Site) -> None:
    """Some login shells print a banner."""
    site.node("a")
    sweeper = site.sweeper(python=script(site, f'echo "Welcome. You have mail."; exec {site.python} "$@"'))
    for _ in range(2):
        assert isinstance(sweeper.sweep(LONG)["a"].found, NodeReading)


def test_after_the_server_was_restarted_the_node_is_probed_at_once(site: Site) -> None:
    """A connection that broke between two sweeps is no miss."""
    node = site.node("a")
    site.node("b")
    sweeper = site.sweeper(failure_threshold=1)
    sweeper.sweep(LONG)
    node.stop()
    node.start()
    assert isinstance(sweeper.sweep(LONG)["a"].found, NodeReading)


def test_a_collector_that_was_killed_is_started_again(site: Site) -> None:
    """Over the same connection."""
    node = site.node("a")
    sweeper = site.sweeper()
    sweeper.sweep(LONG)
    wait_until(lambda: len(collectors(node)) == 1, seconds=60)  # what a look forks is gone in a moment
    (pid,) = collectors(node)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}").exists() and not is_alive(sweeper, "a"), seconds=60)
    assert isinstance(sweeper.sweep(LONG)["a"].found, NodeReading)
    assert node.logins() == 1


def test_a_node_is_unreachable_only_after_several_failures(site: Site) -> None:
    """The count continues over sweeps, so a node that stays unreachable costs one attempt; an answer resets it."""
    off = site.node("off")
    site.node("on")
    off.stop()
    sweeper = site.sweeper(failure_threshold=3)
    assert [missed(sweeper, "off") for _ in range(2)] == [3, 4]
    off.start()
    assert isinstance(sweeper.sweep(LONG)["off"].found, NodeReading)
    off.stop()
    assert missed(sweeper, "off") == 3


def test_a_node_that_answers_the_second_time_is_reachable(site: Site) -> None:
    """The first attempt meets a server that hangs up on everybody."""
    site.node("on")
    with refusing(times=1) as (address, port, real):
        node = Sshd(site.place / "shy", address, site.key.with_suffix(".pub"), port=port)
        site.nodes["shy"] = node
        with site.known_hosts.open("a") as file:
            file.write(node.known)
        real(node)
        look = site.sweeper().sweep(LONG)["shy"]
    assert isinstance(look.found, NodeReading), look


def test_when_all_nodes_fail_at_once_the_network_is_suspect(site: Site) -> None:
    """That two nodes end together is less likely than a failure of our network."""
    for name in ("a", "b"):
        site.node(name).stop()
    looks = site.sweeper().sweep(LONG)
    for look in looks.values():
        assert isinstance(look.found, Unknown)
        assert mentions(look.found.why, "all 2 nodes", "network")
        assert "refused" in look.found.why


def test_the_only_node_of_a_cluster_can_be_unreachable(site: Site) -> None:
    """There is no other node to compare with."""
    site.node("a").stop()
    assert isinstance(site.sweeper().sweep(LONG)["a"].found, UnansweredProbe)


@pytest.mark.parametrize(
    ("text", "why"),
    [(None, "there is no such file"), ("", "it is no private key"), ("ssh-ed25519 AAAA x\n", "it is no private key")],
)
def test_a_key_file_that_cannot_be_used_is_refused_at_once(site: Site, text: str | None, why: str) -> None:
    """Before any node is asked."""
    site.node("a")
    path = site.place / "key"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UnusableFile, match=why) as refused:
        site.sweeper(key=str(path))
    assert str(path) in str(refused.value)


def test_a_named_known_hosts_file_must_exist(site: Site) -> None:
    """A typing error in its name must not look like unknown hosts."""
    site.node("a")
    with pytest.raises(UnusableFile, match="no such file"):
        site.sweeper(known_hosts=str(site.place / "gone"))


def collectors(node: Sshd) -> list[int]:
    """Return the interpreters that run below the node's server."""
    found = []
    for pid in node.children():
        try:
            if b"sys.stdin.buffer" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def is_alive(sweeper: SshSweeper, node: str) -> bool:
    """Return whether the collector of *node* is believed to live."""
    connection = sweeper._nodes[node]
    return bool(connection.collector and connection.collector.is_alive)


def missed(sweeper: SshSweeper, node: str) -> int:
    """Sweep, and return the node's failures in a row."""
    found = sweeper.sweep(LONG)[node].found
    assert isinstance(found, UnansweredProbe)
    return found.times


@contextmanager
def refusing(times: int) -> Iterator[tuple[str, int, Callable[[Sshd], None]]]:
    """Give an address whose first connections are closed at once; from then on they go to a real server behind it."""
    with closing(socket.create_server(("127.0.0.99", 0))) as front:
        address, port = front.getsockname()
        behind: list[tuple[str, int]] = []
        open_ones: list[socket.socket] = []

        def serve() -> None:
            for number in range(1000):
                try:
                    ours, _ = front.accept()
                except OSError:
                    return
                if number < times:
                    ours.close()
                    continue
                open_ones.extend((ours, theirs := socket.create_connection(behind[0])))
                for one, other in ((ours, theirs), (theirs, ours)):
                    threading.Thread(target=pipe, args=(one, other), daemon=True).start()

        def real(node: Sshd) -> None:
            node.address = "127.0.0.98"
            node.start()
            behind.append((node.address, node.port))
            node.address = address

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        yield address, port, real
        front.shutdown(socket.SHUT_RDWR)
        server.join()
        for sock in open_ones:
            sock.close()


def pipe(one: socket.socket, other: socket.socket) -> None:
    """Carry what *one* says to *other*."""
    try:
        while data := one.recv(1 << 16):
            other.sendall(data)
    except OSError:
        pass
    for sock in (one, other):
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue
