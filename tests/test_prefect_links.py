"""Links to the Prefect UI: as Prefect itself derives them, without importing it."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_UI_URL, temporary_settings

from holdfast.prefect.links import incident_key, ui_link, ui_url

CLOUD = "https://api.prefect.cloud/api/accounts/0a1b/workspaces/2c3d"


@pytest.mark.parametrize("api", ["http://127.0.0.1:4200/api", "https://prefect.lab.example/api/", "https://lab.example/prefect/api", CLOUD])
def test_the_ui_is_where_prefect_says_it_is(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a server of one's own, one behind a path, and Prefect Cloud."""
    monkeypatch.setenv("PREFECT_API_URL", api)
    with temporary_settings({PREFECT_API_URL: api.rstrip("/")}):
        assert ui_url() == PREFECT_UI_URL.value()


def test_a_ui_url_that_is_set_wins_also_from_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server behind a proxy shows its UI elsewhere."""
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    monkeypatch.setenv("PREFECT_API_URL", "http://10.0.0.1:4200/api")
    (tmp_path / "profiles.toml").write_text('active = "lab"\n[profiles.lab]\nPREFECT_UI_URL = "https://ui.example/"\n')
    monkeypatch.delenv("PREFECT_PROFILE", raising=False)
    assert ui_link("flow-run", "0af1") == "https://ui.example/runs/flow-run/0af1"
    assert ui_link("artifact", incident_key("gpt", 3)) == "https://ui.example/artifacts/key/gpt-incident-3"


def test_without_a_server_there_is_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than one that leads nowhere."""
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    for name in ("PREFECT_API_URL", "PREFECT_UI_URL", "PREFECT_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    assert ui_link("flow-run", "0af1") == ""
