"""Ask a Prefect server over its API, as its UI does."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import httpx

from tests.waiting import wait_until

SECONDS = 120.0
"""Twice as long as Prefect's server waits for its SQLite (`PRAGMA busy_timeout`): a write that is stuck behind another one ends by then."""


def ask(url: str, body: Any = None, *, method: str = "") -> Any:
    """Return the answer to a POST of *body*, or to a GET without one; wait while its SQLite is locked, as Prefect's client does.

    A request that the server does not answer in time is sent again.
    """
    answers = list[httpx.Response]()

    def answered() -> bool:
        with suppress(httpx.TimeoutException):
            answers.append(httpx.request(method or ("GET" if body is None else "POST"), url, json=body, timeout=30))
        return bool(answers) and answers[-1].status_code != httpx.codes.SERVICE_UNAVAILABLE

    wait_until(answered, seconds=SECONDS)
    answer = answers[-1].raise_for_status()
    return answer.json() if answer.content else None
