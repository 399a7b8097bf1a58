"""Private keys and passphrases: from files, the environment, Prefect blocks and the SSH agent, and never in a message."""

from __future__ import annotations

import subprocess
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.cluster.ssh.connector import targets_of
from holdfast.cluster.ssh.credentials import CONFIGURE, KEY, PASSPHRASE, SSH_ADD, Keys
from holdfast.detectors.evidence import Unknown
from holdfast.detectors.nodes.readings import NodeReading
from holdfast.errors import BadFile, UnusableFile
from holdfast.prefect import server
from holdfast.spec import SshCluster, load_cluster
from tests.mentions import mentions
from tests.ssh.conftest import Site
from tests.ssh.sshd import key_at
from tests.waiting import wait_until

PHRASE = "correct-horse-battery"


def cluster_in(path: Path) -> SshCluster:
    """Return the cluster that a file describes."""
    made = load_cluster(path)
    assert isinstance(made, SshCluster)
    return made


def test_a_key_from_the_environment_works(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written to no disk, and a newline that is missing at its end does not matter."""
    site.node("a")
    monkeypatch.setenv("SITE_KEY", site.key.read_text().strip())
    site.key.unlink()
    look = site.sweeper(key="env:SITE_KEY").sweep()["a"]
    assert isinstance(look.found, NodeReading)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (
            "env:SITE_KEY",
            None,
            "the private key env:SITE_KEY cannot be used: the variable is not set, or is empty. Set SITE_KEY where",
        ),
        ("env:SITE_KEY", "hunter2", "the private key env:SITE_KEY cannot be used: it is no private key that can be used here"),
        (
            "block:site",
            None,
            "the private key block:site cannot be used: it is a Prefect block, and no server is configured. Set PREFECT_API_URL",
        ),
    ],
)
def test_an_unusable_key_is_named_and_never_shown(name: str, value: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in its place."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.delenv("SITE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("SITE_KEY", value)
    with pytest.raises(UnusableFile) as raised:
        Keys().load(name)
    assert words in str(raised.value)
    assert "hunter2" not in str(raised.value)


def test_an_unreachable_prefect_server_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address may contain one."""
    monkeypatch.setenv("PREFECT_API_URL", "http://ann:hunter2@127.0.0.1:9/api")
    assert server.unreachable_reason("http://ann:hunter2@127.0.0.1/api", 0.0) == "nonnumeric port: '***@127.0.0.1'"
    with pytest.raises(UnusableFile, match=r"the Prefect server at http://ann:\*\*\*@127\.0\.0\.1:9/api does not return it") as raised:
        Keys().load("block:site")
    assert "hunter2" not in str(raised.value)


def test_a_name_of_a_secret_is_no_path(tmp_path: Path) -> None:
    """Paths are relative to the cluster file's folder; the name of a secret is not."""
    (tmp_path / "c.yaml").write_text("kind: ssh\nhosts: [a, {name: b, key: 'block:other'}]\nkey: env:SITE_KEY\n")
    made = load_cluster(tmp_path / "c.yaml")
    assert made.kind == "ssh"
    assert (made.key, made.hosts[1].key) == ("env:SITE_KEY", "block:other")


@contextmanager
def agent_with(keys: list[Path], socket: Path) -> Iterator[None]:
    """Run an SSH agent with keys, for as long as it is needed."""
    with subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.DEVNULL) as agent:
        try:
            wait_until(socket.exists, seconds=60)
            subprocess.run(["ssh-add", "-q", *keys], env={"SSH_AUTH_SOCK": str(socket)}, check=True)
            yield
        finally:
            agent.terminate()


def test_one_of_the_ssh_agents_keys_may_be_named(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that refused too many is not faulty; the public half, or the encrypted private one, selects the key."""
    node = site.node("a", "MaxAuthTries 3")
    with agent_with([*(key_at(tmp_path / f"other-{number}") for number in range(3)), site.key], tmp_path / "agent"):
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        found = site.sweeper(key=None).sweep()["a"].found
        assert isinstance(found, Unknown), "it speaks against no node"
        assert mentions(found.why, "3 keys", "SSH agent", "`key`")
        wait_until(lambda: "oo many authentication failures" in node.log, seconds=60, explain=lambda: node.log)
        public = str(site.key.with_suffix(".pub"))
        assert isinstance(site.sweeper(key=public).sweep()["a"].found, NodeReading)
        subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "hunter2", "-f", site.key], check=True, stdout=subprocess.DEVNULL)
        sweeper = site.sweeper()
        assert isinstance(sweeper.sweep()["a"].found, NodeReading)
        another = str(key_at(tmp_path / "another").with_suffix(".pub"))
        with pytest.raises(UnusableFile) as refused:
            Keys().load(another)
        assert (refused.value.path, SSH_ADD in refused.value.cure) == (another, True)
        (tmp_path / "garbage.pub").write_text("ssh-ed25519 oops\n")
        with pytest.raises(UnusableFile) as refused:
            Keys().load(str(tmp_path / "garbage.pub"))
        assert (refused.value.path, SSH_ADD in refused.value.cure) == (str(tmp_path / "garbage.pub"), False)
    node.stop()
    node.start()
    gone = sweeper.sweep()["a"].found
    assert isinstance(gone, Unknown)
    assert mentions(gone.why, "key")
    assert ". `ssh-add` it" in gone.why
    with pytest.raises(UnusableFile) as refused:
        site.sweeper()
    assert (refused.value.path, CONFIGURE in refused.value.cure, SSH_ADD in refused.value.cure) == (str(site.key), True, True)


def test_a_passphrase_is_read_from_where_the_cluster_says(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From the environment or a file, for a key in a file or in the environment; no message or log shows it."""
    caplog.set_level(0)
    node = site.node("a")
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", PHRASE, "-f", site.key], check=True, stdout=subprocess.DEVNULL)
    (tmp_path / "phrase").write_text(PHRASE + "\n")
    monkeypatch.setenv("SITE_PHRASE", PHRASE)
    monkeypatch.setenv("SITE_KEY", site.key.read_text())
    monkeypatch.setenv("WRONG", "not-" + PHRASE)
    for key, passphrase in ((str(site.key), "env:SITE_PHRASE"), ("env:SITE_KEY", str(tmp_path / "phrase"))):
        assert isinstance(site.sweeper(key=key, passphrase=passphrase).sweep()["a"].found, NodeReading)
    assert node.logins() == 2
    gone = str(tmp_path / "gone")
    refusals: tuple[tuple[str | None, str, str, str], ...] = (
        (None, KEY, str(site.key), "it has a passphrase, and there is no SSH agent for its private half"),
        ("env:WRONG", PASSPHRASE, "env:WRONG", f"it does not open the private key {site.key}"),
        ("env:GONE", PASSPHRASE, "env:GONE", "the variable is not set, or is empty"),
        (gone, PASSPHRASE, gone, "No such file or directory"),
    )
    for named, *expected in refusals:
        with pytest.raises(UnusableFile) as refused:
            site.sweeper(passphrase=named)
        assert [refused.value.what, refused.value.path, refused.value.reason] == expected
        assert refused.value.cure
        assert PHRASE not in "".join(traceback.format_exception(refused.value))
    (tmp_path / "c.yaml").write_text(f"kind: ssh\nhosts: [a]\npassphrase: {PHRASE}\n")
    with pytest.raises(BadFile, match=r"passphrase") as slip:
        load_cluster(tmp_path / "c.yaml")
    assert PHRASE not in "".join(traceback.format_exception(slip.value)) + caplog.text
    (tmp_path / "c.yaml").write_text("kind: ssh\nhosts: [{name: a, passphrase: ./own}, b]\npassphrase: env:SITE_PHRASE\n")
    doors = [one.endpoint.passphrase for one in targets_of(cluster_in(tmp_path / "c.yaml"), lambda: "me")]
    assert doors == [str(tmp_path / "own"), "env:SITE_PHRASE"]
