"""`holdfast notify`: what cannot be done is refused with the cure; that messages arrive is shown with a server in tests/integration."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Command


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("add", "ops"), "Name one address"),
        (("add", "ops", "--webhook", "http://a", "--apprise", "mailto://a"), "Name one address"),
        (("add", "ops", "--webhook", "example.com"), "it has no `://`"),
        (("add", "ops", "--webhook", "mailto://a"), "`--apprise` takes others"),
        (("add", "ops", "--webhook", "http://a"), "set PREFECT_API_URL"),
        (("list",), "set PREFECT_API_URL"),
        (("test", "ops"), "set PREFECT_API_URL"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_cure(
    here: Command, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], why: str
) -> None:
    """Before anything is asked of a server."""
    monkeypatch.setenv("PREFECT_HOME", "/nowhere")
    refused = here("notify", *words)
    assert refused.returncode == 2
    assert why in refused.stderr


def test_a_server_that_is_away_is_named(here: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to look at."""
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    refused = here("notify", "list")
    assert refused.returncode == 2
    assert "Look at PREFECT_API_URL" in refused.stderr
