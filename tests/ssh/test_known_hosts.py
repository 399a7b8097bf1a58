"""known_hosts as OpenSSH writes it: names, ports, hashes, patterns, revoked keys; and nothing else is trusted."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from paramiko import PKey

from holdfast.errors import UnusableFile
from holdfast.ssh.known_hosts import KnownHosts, name_in_file
from holdfast.ssh.trouble import Unasked
from tests.ssh.sshd import key_at


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[PKey, PKey]:
    """Give two keys."""
    place = tmp_path_factory.mktemp("keys")
    return PKey.from_path(key_at(place / "a")), PKey.from_path(key_at(place / "b"))


def known(tmp_path: Path, text: str) -> KnownHosts:
    """Write a file, and read it."""
    (tmp_path / "known").write_text(text)
    return KnownHosts.read(str(tmp_path / "known"))


def line(names: str, key: PKey) -> str:
    """Return a line of the file."""
    return f"{names} {key.get_name()} {key.get_base64()} a comment\n"


def test_names_and_ports_are_told_apart(tmp_path: Path, keys: tuple[PKey, PKey]) -> None:
    """A server on another port is another server."""
    one, other = keys
    found = known(tmp_path, line("a.example.org,10.0.0.1", one) + line("[a.example.org]:2222", other))
    found.check("a.example.org", one)
    found.check("10.0.0.1", one)
    found.check(name_in_file("a.example.org", 2222), other)
    with pytest.raises(Unasked, match="changed host key"):
        found.check("[a.example.org]:2222", one)
    with pytest.raises(Unasked, match="unknown host key"):
        found.check("[10.0.0.1]:2222", one)


def test_several_keys_of_one_host_are_all_good(tmp_path: Path, keys: tuple[PKey, PKey]) -> None:
    """As while a key is being changed."""
    found = known(tmp_path, "".join(line("a", key) for key in keys))
    for key in keys:
        found.check("a", key)
    assert found.types_of("a") == ["ssh-ed25519"]


def test_a_file_that_openssh_has_hashed_is_understood(tmp_path: Path, keys: tuple[PKey, PKey]) -> None:
    """By `ssh-keygen -H`."""
    (tmp_path / "known").write_text(line("a.example.org", keys[0]) + line("[b]:2222", keys[1]))
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", tmp_path / "known"], check=True, capture_output=True)
    assert "example" not in (tmp_path / "known").read_text()
    found = KnownHosts.read(str(tmp_path / "known"))
    found.check("a.example.org", keys[0])
    found.check("[b]:2222", keys[1])
    with pytest.raises(Unasked, match="unknown host key"):
        found.check("b", keys[1])


def test_patterns_and_their_exceptions_hold(tmp_path: Path, keys: tuple[PKey, PKey]) -> None:
    """As in the manual of sshd: a negated name is not matched, whatever else does."""
    found = known(tmp_path, line("gpu-?.example.org,*.lab,!bad.lab,[*.port]:2222", keys[0]))
    for name in ("gpu-7.example.org", "x.lab", "[x.port]:2222"):
        found.check(name, keys[0])
    for name in ("gpu-17.example.org", "bad.lab", "[x.port]:2223"):
        with pytest.raises(Unasked, match="unknown host key"):
            found.check(name, keys[0])


def test_a_revoked_key_is_never_trusted(tmp_path: Path, keys: tuple[PKey, PKey]) -> None:
    """Not where another line has it either."""
    found = known(tmp_path, line("a", keys[0]) + "@revoked " + line("*", keys[0]))
    with pytest.raises(Unasked, match="revoked"):
        found.check("a", keys[0])


def test_what_is_no_line_is_left_out(tmp_path: Path, keys: tuple[PKey, PKey]) -> None:
    """Comments, blanks, half lines, authorities, garbage: the others hold."""
    garbage = "# a comment\n\na\na ssh-ed25519\na ssh-ed25519 ???\n|1|x ssh-ed25519 AAAA\n\x00\xff\n"
    found = known(tmp_path, garbage + "@cert-authority " + line("*", keys[1]) + line("b", keys[0]))
    found.check("b", keys[0])
    with pytest.raises(Unasked, match="unknown host key"):
        found.check("c", keys[1])


def test_only_a_file_that_is_named_has_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a file of their own trusts nobody."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert KnownHosts.read(None).types_of("a") == []
    with pytest.raises(UnusableFile):
        KnownHosts.read(str(tmp_path / "gone"))
    with pytest.raises(UnusableFile, match="Is a directory"):
        KnownHosts.read(str(tmp_path))
