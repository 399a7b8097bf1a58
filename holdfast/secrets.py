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
from http import HTTPStatus
from http.client import HTTPException
from typing import Any, Final

from holdfast.errors import SecretUnavailable, UnusableFile
from holdfast.prefect import server as prefect_server
from holdfast.redaction import shown, without

VARIABLE: Final = "env:"
BLOCK: Final = "block:"
SECONDS: Final = 10.0
WHERE: Final = "block_types/slug/secret/block_documents/name"
"""Under the API's address: where Prefect's server has its blocks of the type `Secret`."""
NAME_ONE: Final = "Set PREFECT_API_URL to the server that has it, or name that in Prefect's profile (`prefect config set`)"
NO_SUCH: Final = "the Prefect server has no block of the type Secret by this name"
NONE_NAMED: Final = "no Prefect server is named, and the temporary one that stands in has no block of the type Secret by this name"

_read: Final[dict[tuple[str, str], str]] = {}
"""What blocks hold, by server and name."""


def is_secret_reference(name: str) -> bool:
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
    """Return what a block holds: read once, as a server that is away must hold up nobody who has it already."""
    named = prefect_server.named()
    server, block = named or prefect_server.configured(), name.removeprefix(BLOCK)
    if not server:
        raise UnusableFile(what, name, "it is a Prefect block, and no server is named", NAME_ONE)
    if (server, block) not in _read:
        _read[server, block] = _asked(server, block, name, what, NO_SUCH if named else NONE_NAMED)
    return _read[server, block]


def _asked(server: str, block: str, name: str, what: str, missing: str) -> str:
    request = urllib.request.Request(  # noqa: S310 (the address of the user's own server)
        f"{server.rstrip('/')}/{WHERE}/{urllib.parse.quote(block, safe='')}?include_secrets=true", headers=_proof()
    )
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:  # noqa: S310
            return _value(json.load(answer), name, what)
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.NOT_FOUND:
            cure = f'Save it: `Secret(value=...).save("{block}")`, or in the Prefect UI under Blocks'
            raise UnusableFile(
                what, name, missing, cure if missing == NO_SUCH else f"{NAME_ONE}. Where it is in none yet: {cure}"
            ) from error
        kind = SecretUnavailable if error.code >= HTTPStatus.INTERNAL_SERVER_ERROR else UnusableFile
        raise kind(what, name, f"the Prefect server answers {error.code}", "Mend PREFECT_API_KEY, or the server") from error
    except (OSError, HTTPException) as error:
        raise SecretUnavailable(what, name, _silent(server, error), "Start it, or mend PREFECT_API_URL") from error
    except ValueError as error:
        raise UnusableFile(what, name, _silent(server, error), "Mend PREFECT_API_URL") from error


def _silent(server: str, error: Exception) -> str:
    return f"the Prefect server at {shown(server)} does not give it: {without(str(error), server)}"


def _proof() -> dict[str, str]:
    """Return who we are to the server, as Prefect's own client says it."""
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
        raise UnusableFile(what, name, "the block holds no text", "Save the secret itself in it, as text")
    return value
