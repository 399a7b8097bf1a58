"""Secrets out of where a user keeps them: a variable of the environment or a block of Prefect's, named in a file that may be shown.

What a file says is the secret's name, never the secret: that is read when it is needed, and kept in memory alone.
"""

from __future__ import annotations

import base64
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, Final

from holdfast.errors import UnusableFile

VARIABLE: Final = "env:"
BLOCK: Final = "block:"
SECONDS: Final = 10.0
WHERE: Final = "block_types/slug/secret/block_documents/name"
"""Under the API's address: where Prefect's server has its blocks of the type `Secret`."""


def is_elsewhere(name: str) -> bool:
    """Tell whether *name* names a secret that is in no file: `env:VARIABLE`, or `block:NAME` for a Prefect block of the type `Secret`."""
    return name.startswith((VARIABLE, BLOCK))


def secret(name: str, what: str) -> str:
    """Return the secret called *name*, which is *what* to its user; raise `UnusableFile` with what keeps it from being had."""
    if name.startswith(VARIABLE):
        variable = name.removeprefix(VARIABLE)
        value = os.environ.get(variable)
        if not value:
            raise UnusableFile(what, name, "there is no such variable, or it is empty", f"Set {variable} where Holdfast runs")
        return value
    return _of_block(name, what)


def _of_block(name: str, what: str) -> str:
    server, block = os.environ.get("PREFECT_API_URL"), name.removeprefix(BLOCK)
    if not server:
        raise UnusableFile(what, name, "it is a Prefect block, and no server is named", "Set PREFECT_API_URL")
    request = urllib.request.Request(  # noqa: S310 (the address of the user's own server)
        f"{server.rstrip('/')}/{WHERE}/{urllib.parse.quote(block, safe='')}?include_secrets=true", headers=_proof()
    )
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:  # noqa: S310
            return _value(json.load(answer), name, what)
    except urllib.error.HTTPError as error:
        if error.code == 404:  # noqa: PLR2004 (as HTTP has it)
            cure = f'Save it: `Secret(value=...).save("{block}")`, or in the Prefect UI under Blocks'
            raise UnusableFile(what, name, "the Prefect server has no block of the type Secret by this name", cure) from error
        raise UnusableFile(what, name, f"the Prefect server answers {error.code}", "Mend PREFECT_API_KEY, or the server") from error
    except (OSError, ValueError) as error:
        reason = f"the Prefect server at {_shown(server)} does not give it: {error}"
        raise UnusableFile(what, name, reason, "Start it, or mend PREFECT_API_URL") from error


def _proof() -> dict[str, str]:
    """Return who we are to the server, as Prefect's own client says it."""
    if key := os.environ.get("PREFECT_API_KEY"):
        return {"Authorization": f"Bearer {key}"}
    if pair := os.environ.get("PREFECT_API_AUTH_STRING"):
        return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
    return {}


def _value(document: Any, name: str, what: str) -> str:  # noqa: ANN401 (whatever JSON a server answers with)
    try:
        value = document["data"]["value"]
    except (KeyError, TypeError):
        value = None
    if not isinstance(value, str) or not value:
        raise UnusableFile(what, name, "the block holds no text", "Save the secret itself in it, as text")
    return value


def _shown(server: str) -> str:
    """Return the server's address without a name and a password that may stand in it."""
    parts = urllib.parse.urlsplit(server)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
