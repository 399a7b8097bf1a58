"""``python -m holdfast.prefect.check server|worker``: ask whether that part of Prefect answers on this host.

Where it listens is read from the same settings as the part itself reads. Standard library only: it is run every minute.
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
SILENT: Final = 3
"""Exit status for a part that does not answer. Any other but 0 says that nobody could look, and is no reason to restart anything."""
PARTS: Final = {
    "server": ("PREFECT_SERVER_API_HOST", "PREFECT_SERVER_API_PORT", 4200, "/api/health"),
    "worker": ("PREFECT_WORKER_WEBSERVER_HOST", "PREFECT_WORKER_WEBSERVER_PORT", 8080, "/health"),
}
ANYWHERE: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 (asked, not bound)


NO_ADDRESS: Final = (ValueError, socket.gaierror, http.client.InvalidURL)
"""What says that a host's name or a port is none."""


def address_of(part: str) -> str:
    """Return where *part* answers, by the settings in our environment."""
    host_setting, port_setting, usual, path = PARTS[part]
    host = os.environ.get(host_setting, "").strip("[]")
    host = ANYWHERE.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{os.environ.get(port_setting) or usual}{path}"


def why_silent(url: str) -> str:
    """Return why nobody answers at *url*; empty when somebody does, whatever is said about who may ask; raise `NO_ADDRESS`."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        return "" if error.code < HTTPStatus.INTERNAL_SERVER_ERROR else f"it answers {error.code}"
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, NO_ADDRESS):
            raise reason from error
        return str(reason)


def main(arguments: list[str]) -> int:
    """Look once; say what is wrong."""
    if len(arguments) != 1 or arguments[0] not in PARTS:
        print(f"usage: python -m holdfast.prefect.check {'|'.join(PARTS)}", file=sys.stderr)  # noqa: T201
        return 2
    url = address_of(arguments[0])
    try:
        why = why_silent(url)
    except NO_ADDRESS as error:
        print(f"{url} is no address: {error}. Mend {' and '.join(PARTS[arguments[0]][:2])}.", file=sys.stderr)  # noqa: T201
        return 2
    if why:
        print(f"Prefect's {arguments[0]} does not answer at {url}: {why}", file=sys.stderr)  # noqa: T201
    return SILENT if why else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
