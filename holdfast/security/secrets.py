"""Read secrets from where a user keeps them: a variable of the environment, or a Prefect block.

Files name a secret, and never contain it: it is read when it is needed, and kept in memory only.
"""

from __future__ import annotations

import base64
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from http import HTTPStatus
from http.client import HTTPException
from typing import Any, Final

from holdfast.errors import SecretUnavailable, UnusableFile
from holdfast.prefect import server as prefect_server
from holdfast.security.redaction import shown, without

VARIABLE: Final = "env:"
BLOCK: Final = "block:"
REQUEST_SECONDS: Final = 10.0
BLOCKS: Final = "block_types/slug/secret/block_documents/name"
"""Path of the blocks of the type `Secret` below the address of Prefect's API."""
SET_URL: Final = "Set PREFECT_API_URL to the server that has it, or set it in Prefect's profile (`prefect config set`)"
NO_BLOCK: Final = "the Prefect server has no block of the type Secret by this name"
NO_SERVER: Final = "no Prefect server is configured, and the temporary one has no block of the type Secret by this name"

_read: Final[dict[tuple[str, str], str]] = {}
"""What blocks hold, by server and name."""


def is_secret_reference(name: str) -> bool:
    """Return whether *name* refers to a secret: `env:VARIABLE`, or `block:NAME` for a Prefect block of the type `Secret`."""
    return name.startswith((VARIABLE, BLOCK))


def secret(name: str, what: str) -> str:
    """Return the secret called *name*, which the user knows as *what*; raise `UnusableFile` when it cannot be read."""
    if name.startswith(VARIABLE):
        variable = name.removeprefix(VARIABLE)
        value = os.environ.get(variable)
        if not value:
            raise UnusableFile(what, name, "the variable is not set, or is empty", f"Set {variable} where Holdfast runs")
        return value
    return _block_value(name, what)


def _block_value(name: str, what: str) -> str:
    """Return the value of a block. It is read once, so that a server that is down later does no harm."""
    named = prefect_server.named()
    server, block = named or prefect_server.configured(), name.removeprefix(BLOCK)
    if not server:
        raise UnusableFile(what, name, "it is a Prefect block, and no server is configured", SET_URL)
    if (server, block) not in _read:
        _read[server, block] = _request(server, block, name, what, NO_BLOCK if named else NO_SERVER)
    return _read[server, block]


def _request(server: str, block: str, name: str, what: str, missing: str) -> str:
    request = urllib.request.Request(  # noqa: S310 (the address of the user's own server)
        f"{server.rstrip('/')}/{BLOCKS}/{urllib.parse.quote(block, safe='')}?include_secrets=true", headers=_credentials()
    )
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer:  # noqa: S310
            return _value(json.load(answer), name, what)
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.NOT_FOUND:
            cure = f'Save it: `Secret(value=...).save("{block}")`, or in the Prefect UI under Blocks'
            raise UnusableFile(
                what, name, missing, cure if missing == NO_BLOCK else f"{SET_URL}. If no server has it yet: {cure}"
            ) from error
        kind = SecretUnavailable if error.code >= HTTPStatus.INTERNAL_SERVER_ERROR else UnusableFile
        raise kind(what, name, f"the Prefect server answers {error.code}", "Correct PREFECT_API_KEY, or repair the server") from error
    except (OSError, HTTPException) as error:
        raise SecretUnavailable(what, name, _unavailable(server, error), "Start it, or correct PREFECT_API_URL") from error
    except ValueError as error:
        raise UnusableFile(what, name, _unavailable(server, error), "Correct PREFECT_API_URL") from error


def _unavailable(server: str, error: Exception) -> str:
    return f"the Prefect server at {shown(server)} does not return it: {without(str(error), server)}"


def _credentials() -> dict[str, str]:
    """Return the header that authenticates us, as Prefect's own client sends it."""
    own = prefect_server.is_temporary_server() and not prefect_server.named()
    if not own and (key := prefect_server.setting("PREFECT_API_KEY")):
        return {"Authorization": f"Bearer {key}"}
    if pair := prefect_server.auth_string():
        return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
    return {}


def _value(document: Any, name: str, what: str) -> str:  # noqa: ANN401 (whatever JSON a server answers with)
    try:
        value = document["data"]["value"]
    except (KeyError, TypeError):
        value = None
    if not isinstance(value, str) or not value:
        raise UnusableFile(what, name, "the block has no text", "Save the secret itself in it, as text")
    return value
