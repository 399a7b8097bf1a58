"""A key that is a block of Prefect's: asked of a real server, by whoever opens the cluster."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast.errors import UnusableFile
from holdfast.secret import secret
from tests.integration.conftest import PrefectServer

SAVE = "import sys; from prefect.blocks.system import Secret; Secret(value=sys.stdin.read()).save('site-key')"


def test_a_secret_is_read_out_of_a_block(prefect_server: PrefectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user saved it; one that is not there is named with the way to save it."""
    subprocess.run([sys.executable, "-c", SAVE], input="a\nsecret", text=True, env=prefect_server.environment, check=True)
    monkeypatch.setenv("PREFECT_API_URL", prefect_server.url)
    assert secret("block:site-key", "the key") == "a\nsecret"
    with pytest.raises(
        UnusableFile, match=r'no block of the type Secret by this name\. Save it: `Secret\(value=\.\.\.\)\.save\("other"\)`'
    ):
        secret("block:other", "the key")
