"""Keys that are in no file: the cluster's file names them, and nobody else learns them."""

from __future__ import annotations

from pathlib import Path

import pytest

from detectors.readings import NodeReading
from holdfast.errors import UnusableFile
from holdfast.spec import load_cluster
from holdfast.ssh.login import Keys
from tests.ssh.conftest import Site


def test_a_key_out_of_the_environment_lets_us_in(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written to no disk, and a newline that got lost at its end on the way is no harm."""
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
            "the private key env:SITE_KEY cannot be used: there is no such variable, or it is empty. Set SITE_KEY where",
        ),
        ("env:SITE_KEY", "hunter2", "the private key env:SITE_KEY cannot be used: it is no private key that can be used here"),
        (
            "block:site",
            None,
            "the private key block:site cannot be used: it is a Prefect block, and no server is named. Set PREFECT_API_URL",
        ),
    ],
)
def test_a_key_that_cannot_be_had_is_named_and_never_shown(
    name: str, value: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stands in its place."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.delenv("SITE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("SITE_KEY", value)
    with pytest.raises(UnusableFile) as raised:
        Keys().load(name)
    assert words in str(raised.value)
    assert "hunter2" not in str(raised.value)


def test_a_server_that_is_away_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address may hold one."""
    monkeypatch.setenv("PREFECT_API_URL", "http://ann:hunter2@127.0.0.1:9/api")
    with pytest.raises(UnusableFile, match=r"the Prefect server at http://127\.0\.0\.1:9/api does not give it") as raised:
        Keys().load("block:site")
    assert "hunter2" not in str(raised.value)


def test_a_name_of_a_secret_is_no_path(tmp_path: Path) -> None:
    """Files are seen from the cluster's folder; a secret is where it is."""
    (tmp_path / "c.yaml").write_text("kind: ssh\nhosts: [a, {name: b, key: 'block:other'}]\nkey: env:SITE_KEY\n")
    made = load_cluster(tmp_path / "c.yaml")
    assert made.kind == "ssh"
    assert (made.key, made.hosts[1].key) == ("env:SITE_KEY", "block:other")
