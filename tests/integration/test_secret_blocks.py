"""A key that is a block of Prefect's: asked of a real server, by whoever opens the cluster."""

from __future__ import annotations

import subprocess
import sys
import urllib.parse
from pathlib import Path

import paramiko
import pytest

from holdfast.control.backup import standby as backup
from holdfast.control.backup.standby import BackupPrerequisites
from holdfast.errors import SecretUnavailable, UnusableFile
from holdfast.host.ports import free_port
from holdfast.prefect.server import TEMPORARY_FOR
from holdfast.security.secrets import secret
from holdfast.spec import cluster_of
from tests.burn_in.relay import Relay
from tests.integration.conftest import PrefectServer

SAVE = "import sys; from prefect.blocks.system import Secret; Secret(value=sys.stdin.read()).save('site-key')"


@pytest.fixture(scope="module")
def key(prefect_server: PrefectServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Give a private key that a user has saved as the block `site-key`."""
    path = tmp_path_factory.mktemp("key") / "id"
    paramiko.ECDSAKey.generate().write_private_key_file(str(path))
    text = path.read_text().strip()
    subprocess.run([sys.executable, "-c", SAVE], input=text, text=True, env=prefect_server.environment, check=True)
    return text


def test_a_secret_is_read_out_of_a_block(prefect_server: PrefectServer, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user saved it; one that is not there is named with the way to save it."""
    monkeypatch.setenv("PREFECT_API_URL", prefect_server.url)
    assert secret("block:site-key", "the key") == key
    with pytest.raises(UnusableFile, match=r'`Secret\(value=\.\.\.\)\.save\("other"\)`'):
        secret("block:other", "the key")


@pytest.mark.usefixtures("holdfast_home")
def test_a_flow_whose_own_server_stands_in_asks_the_one_that_has_the_block(
    prefect_server: PrefectServer, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that stands in never had it: to save it there would be of no use."""
    monkeypatch.setenv("PREFECT_API_URL", prefect_server.url)
    monkeypatch.setenv(TEMPORARY_FOR, away := f"http://127.0.0.1:{free_port()}/api")
    with pytest.raises(SecretUnavailable, match=rf"{away} does not return it.*refused.*Start it"):
        secret("block:site-key", "the key")
    monkeypatch.setenv(TEMPORARY_FOR, prefect_server.url)
    assert secret("block:site-key", "the key") == key
    monkeypatch.setenv(TEMPORARY_FOR, "")
    with pytest.raises(UnusableFile, match=r"PREFECT_API_URL"):
        secret("block:other", "the key")


def test_a_standby_has_its_secrets_before_it_needs_them(
    prefect_server: PrefectServer, key: str, holdfast_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a server that is not there yet, which only Prefect's profile names; once it has them it needs that no more."""
    port = free_port()
    (holdfast_home / "profiles.toml").write_text(f'active = "site"\n[profiles.site]\nPREFECT_API_URL = "http://127.0.0.1:{port}/api"\n')
    (holdfast_home / "known").touch()
    monkeypatch.setenv("PREFECT_HOME", str(holdfast_home))
    monkeypatch.setattr(backup, "RETRY", 0.0)
    fields = {"kind": "ssh", "name": "site", "hosts": ["n0"], "user": "u", "known_hosts": str(holdfast_home / "known")}
    cluster, standby = cluster_of({**fields, "key": "block:site-key"}), BackupPrerequisites()
    standby.prepare(cluster)
    assert not standby.is_ready(cluster)
    assert "Start it" in standby.problem
    relay = Relay(urllib.parse.urlsplit(prefect_server.url).port or 0, at=port)
    try:
        standby.prepare(cluster)
    finally:
        relay.close()
    assert standby.is_ready(cluster), standby.problem
    assert standby.problem == ""
    (holdfast_home / "known").unlink()
    standby.take(cluster).close()  # by what it had
    (holdfast_home / "known").touch()
    standby.prepare(cluster)
    standby.take(cluster).close()
    standby.close()
