"""What faults look like in logs: one TOML file a component, a table a kind, read and checked by `load`.

At the head of a file stands what holds for all its kinds unless a kind says otherwise: ``component``, ``source``, ``reference``,
``recommended_action``, ``blame``, ``action``, and ``healthy``, a line that looks alike and is no fault. Every kind has its ``title`` and an
``unhealthy`` line, and is known by one of:

- ``match``: regular expressions, searched for anywhere in a line. A group ``count`` is a number of errors: below ``least`` it is no fault.
- ``keys``: what the group ``key`` of the file's ``family`` expression holds, such as the number of an Xid. A key that no kind claims is of
  the kind ``other``; one in ``quiet`` is no fault.

Files speak in the order of `FILES`, kinds in the order of their file, families after the kinds beside them: the first match wins.
"""

from __future__ import annotations

from typing import Final

from detectors.signatures.loading import BadSignature, Signature, check, load

SIGNATURES: Final = load()
XIDS: Final = tuple(signature for signature in SIGNATURES if signature.place.partition(",")[0] == "xid.toml")
"""What the driver of NVIDIA's GPUs reports by number."""

__all__ = ["SIGNATURES", "XIDS", "BadSignature", "Signature", "check", "load"]
