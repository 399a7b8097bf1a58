"""known_hosts as OpenSSH writes it: names, ports, hashes, patterns, revoked keys; and nothing else is trusted."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from paramiko import HostKeys, PKey
from paramiko.hostkeys import InvalidHostKey

from holdfast.cluster.ssh import known_hosts
from holdfast.cluster.ssh.known_hosts import KnownHosts, name_in_file
from holdfast.detectors.evidence import Unknown
from holdfast.detectors.nodes.readings import NodeReading
from holdfast.errors import UnusableFile
from holdfast.probe.remote.program import ProbeFailed
from tests.ssh.conftest import Site
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


def test_a_key_belongs_to_a_name_and_a_port(tmp_path: Path, keys: tuple[PKey, PKey]) -> None:
    """A server on another port is another server."""
    one, other = keys
    found = known(tmp_path, line("a.example.org,10.0.0.1", one) + line("[a.example.org]:2222", other))
    found.check("a.example.org", one)
    found.check("10.0.0.1", one)
    found.check(name_in_file("a.example.org", 2222), other)
    with pytest.raises(ProbeFailed, match="changed host key"):
        found.check("[a.example.org]:2222", one)
    with pytest.raises(ProbeFailed, match="unknown host key"):
        found.check("[10.0.0.1]:2222", one)


def test_all_keys_of_a_host_are_trusted(tmp_path: Path, keys: tuple[PKey, PKey]) -> None:
    """As while a key is being changed."""
    found = known(tmp_path, "".join(line("a", key) for key in keys))
    for key in keys:
        found.check("a", key)
    assert found.types_of("a") == ["ssh-ed25519"]


def test_a_hashed_file_is_understood(tmp_path: Path, keys: tuple[PKey, PKey]) -> None:
    """Hashed by `ssh-keygen -H`."""
    (tmp_path / "known").write_text(line("a.example.org", keys[0]) + line("[b]:2222", keys[1]))
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", tmp_path / "known"], check=True, capture_output=True)
    assert "example" not in (tmp_path / "known").read_text()
    found = KnownHosts.read(str(tmp_path / "known"))
    found.check("a.example.org", keys[0])
    found.check("[b]:2222", keys[1])
    with pytest.raises(ProbeFailed, match="unknown host key"):
        found.check("b", keys[1])


def test_patterns_and_their_exceptions_hold(tmp_path: Path, keys: tuple[PKey, PKey]) -> None:
    """As in the manual of sshd: a negated name is not matched, whatever else does."""
    found = known(tmp_path, line("gpu-?.example.org,*.lab,!bad.lab,[*.port]:2222", keys[0]))
    for name in ("gpu-7.example.org", "x.lab", "[x.port]:2222"):
        found.check(name, keys[0])
    for name in ("gpu-17.example.org", "bad.lab", "[x.port]:2223"):
        with pytest.raises(ProbeFailed, match="unknown host key"):
            found.check(name, keys[0])


def test_a_revoked_key_is_never_trusted(tmp_path: Path, keys: tuple[PKey, PKey]) -> None:
    """Even where another line has it."""
    found = known(tmp_path, line("a", keys[0]) + "@revoked " + line("*", keys[0]))
    with pytest.raises(ProbeFailed, match="revoked"):
        found.check("a", keys[0])


def test_invalid_lines_are_ignored(tmp_path: Path, keys: tuple[PKey, PKey]) -> None:
    """Comments, blanks, incomplete lines, authorities, garbage: the other lines count."""
    garbage = f"@new {line('c', keys[1])}# a comment\n\na\na ssh-ed25519\na ssh-ed25519 ???\n|1|x ssh-ed25519 AAAA\n\x00\xff\n"
    found = known(tmp_path, garbage + "@cert-authority " + line("*", keys[1]) + line("b", keys[0]))
    found.check("b", keys[0])
    with pytest.raises(ProbeFailed, match="unknown host key"):
        found.check("c", keys[1])


def test_paramiko_reads_less_of_a_file(tmp_path: Path, keys: tuple[PKey, PKey]) -> None:
    """Why its `HostKeys` is not used: what it silently skips is refused, or known, here."""
    one, other = keys
    plain = line("a", one) + line("a", other) + line("*.lab", one) + line("B.org", one)
    found, theirs = known(tmp_path, plain), HostKeys(str(tmp_path / "known"))
    found.check("a", other)
    assert theirs.check("a", one)
    assert not theirs.check("a", other), "of two keys of a type the first alone"
    for name in ("x.lab", "b.org"):
        found.check(name, one)
        assert not theirs.check(name, one)
    for more in ("@revoked " + line("*", other), "@cert-authority " + line("*", other), "|1|x|y" + line("", one), line("c ", one)):
        known(tmp_path, plain + more).check("a", one)
        with pytest.raises((AssertionError, ValueError, InvalidHostKey)):
            HostKeys(str(tmp_path / "known")).check("b", one)


def test_only_a_named_file_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without their own file trusts no host."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert KnownHosts.read(None).types_of("a") == []
    with pytest.raises(UnusableFile):
        KnownHosts.read(str(tmp_path / "gone"))
    with pytest.raises(UnusableFile, match="Is a directory"):
        KnownHosts.read(str(tmp_path))


def test_names_are_case_insensitive(tmp_path: Path, keys: tuple[PKey, PKey]) -> None:
    """On both sides, as with OpenSSH: in names, patterns and hashes."""
    (tmp_path / "known").write_text(line("a.Example.org,[b]:2222,*.LAB", keys[0]))
    KnownHosts.read(str(tmp_path / "known")).check("X.lab", keys[0])
    (tmp_path / "known").write_text(line("a.example.org", keys[0]) + line("[b]:2222", keys[0]))
    for _ in range(2):
        found = KnownHosts.read(str(tmp_path / "known"))
        found.check(name_in_file("A.example.ORG", 22), keys[0])
        found.check(name_in_file("B", 2222), keys[0])
        subprocess.run(["ssh-keygen", "-q", "-H", "-f", tmp_path / "known"], check=True, capture_output=True)


def test_the_files_of_the_machine_count_as_well(tmp_path: Path, keys: tuple[PKey, PKey], monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages name the file; only the user's is written to."""
    site = tmp_path / "ssh_known_hosts"
    monkeypatch.setattr(known_hosts, "SITE", (site, tmp_path / "gone"))
    site.write_text(line("gpu-01", keys[0]) + "@revoked " + line("*", keys[1]))
    found = known(tmp_path, line("mine", keys[0]))
    found.check("gpu-01", keys[0])
    found.check("mine", keys[0])
    with pytest.raises(ProbeFailed, match=f"{site} says is revoked"):
        found.check("mine", keys[1])
    site.write_text(line("gpu-01", keys[0]))
    found = known(tmp_path, "")
    with pytest.raises(ProbeFailed, match=f"changed host key.*{site} has another one.*have {site} corrected"):
        found.check("gpu-01", keys[1])
    with pytest.raises(ProbeFailed, match=f"unknown host key: {tmp_path}/known and {site} has no key of gpu-02"):
        found.check("gpu-02", keys[1])
    before = site.read_text()
    found.add([("gpu-02", keys[1])])
    KnownHosts.read(str(tmp_path / "known")).check("gpu-02", keys[1])
    assert site.read_text() == before


def signed(key: Path, authority: Path, *options: str) -> PKey:
    """Have an authority sign a host's key; return that with its certificate."""
    command: list[str | Path] = ["ssh-keygen", "-q", "-s", authority, "-I", "host-id", *options, key.with_suffix(".pub")]
    subprocess.run(command, check=True, capture_output=True)
    return PKey.from_path(key)


def test_an_authority_vouches_for_the_hosts_that_it_names(tmp_path: Path) -> None:
    """And for no others, not forever, and only with a valid signature."""
    key, authority, other = (key_at(tmp_path / name) for name in ("host", "authority", "other"))
    trusted = "@cert-authority " + line("*.lab,[10.0.0.*]:2222", PKey.from_path(authority))
    found = known(tmp_path, trusted)
    for names, name in (("a.LAB,b.lab", "[a.lab]:2222"), ("?.lab", "A.lab"), ("10.0.0.7", "[10.0.0.7]:2222")):
        found.check(name, signed(key, authority, "-h", "-n", names))
    found.check("a.lab", signed(key, authority, "-h"))
    tampered = signed(key, authority, "-h", "-n", "a.lab")
    blob = tampered.public_blob
    assert blob is not None
    blob.key_blob = blob.key_blob.replace(b"host-id", b"HOST-ID")
    for shown, name, why in (
        (tampered, "a.lab", "its signature is wrong"),
        (signed(key, authority, "-h", "-n", "b.lab"), "a.lab", "it is for b.lab"),
        (signed(key, authority, "-h", "-n", "a.lab", "-V", "20200101Z:20200102Z"), "a.lab", "it is valid 2020-01-01 00:00Z to 2020-01-02"),
        (signed(key, authority, "-n", "a.lab"), "a.lab", "it is a user's"),
        (signed(key, other, "-h", "-n", "a.lab"), "a.lab", "no @cert-authority of a.lab has signed it"),
        (signed(key, authority, "-h", "-n", "a.org"), "a.org", "no @cert-authority of a.org has signed it"),
    ):
        with pytest.raises(ProbeFailed, match=f"unknown host key.*does not count: {why}"):
            found.check(name, shown)
    with pytest.raises(ProbeFailed, match="revoked"):
        known(tmp_path, trusted + "@revoked " + line("*", PKey.from_path(authority))).check("a.lab", signed(key, authority, "-h"))


def test_a_server_with_a_certificate_is_asked_for_it(site: Site) -> None:
    """Where an authority may vouch for it, though its plain key is unknown."""
    node = site.node("a", known=False)
    signed(node.key, authority := key_at(site.place / "authority"), "-h", "-n", node.address)
    site.known_hosts.write_text("@cert-authority " + line("127.0.0.*", PKey.from_path(authority)))
    assert isinstance(unasked := site.sweeper().sweep()["a"].found, Unknown)
    assert "unknown host key" in unasked.why
    node.stop()
    node.more = (f"HostCertificate {node.key}-cert.pub",)
    node.start()
    assert isinstance(site.sweeper().sweep()["a"].found, NodeReading)
