"""Check that the Prefect server or worker on this host answers: ``python -m holdfast.prefect.check server|worker``.

The address comes from the same settings that the server or worker reads. Standard library only, as it runs every minute.
"""

from __future__ import annotations

import http.client
import os
import socket
import sys
import urllib.error
import urllib.request
from http import HTTPStatus
from typing import Final

SECONDS: Final = 10.0
UNREACHABLE: Final = 3
"""Exit status if the part does not answer. Any other one but 0 says that the check itself failed, which is no reason to restart."""
PARTS: Final = {
    "server": ("PREFECT_SERVER_API_HOST", "PREFECT_SERVER_API_PORT", 4200, "/api/health"),
    "worker": ("PREFECT_WORKER_WEBSERVER_HOST", "PREFECT_WORKER_WEBSERVER_PORT", 8080, "/health"),
}
ANYWHERE: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 (connected to, not bound)

BAD_ADDRESS: Final = (ValueError, socket.gaierror, http.client.InvalidURL)
"""Errors for an invalid host name or port."""


def address_of(part: str) -> str:
    """Return the health URL of *part* from its environment variables."""
    host_setting, port_setting, default, path = PARTS[part]
    host = os.environ.get(host_setting, "").strip("[]")
    host = ANYWHERE.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{os.environ.get(port_setting) or default}{path}"


def unreachable_reason(url: str) -> str:
    """Return why nothing answers at *url*; empty if something does, also with a client error; raise `BAD_ADDRESS`."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        return "" if error.code < HTTPStatus.INTERNAL_SERVER_ERROR else f"it answers {error.code}"
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, BAD_ADDRESS):
            raise reason from error
        return str(reason)


def main(arguments: list[str]) -> int:
    """Check once; print what is wrong."""
    if len(arguments) != 1 or arguments[0] not in PARTS:
        print(f"usage: python -m holdfast.prefect.check {'|'.join(PARTS)}", file=sys.stderr)  # noqa: T201
        return 2
    url = address_of(arguments[0])
    try:
        why = unreachable_reason(url)
    except BAD_ADDRESS as error:
        print(f"{url} is not a valid address: {error}. Fix {' and '.join(PARTS[arguments[0]][:2])}.", file=sys.stderr)  # noqa: T201
        return 2
    if why:
        print(f"Prefect's {arguments[0]} does not answer at {url}: {why}", file=sys.stderr)  # noqa: T201
    return UNREACHABLE if why else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
