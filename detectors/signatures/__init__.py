"""Log signatures of faults: one TOML file per component, one table per fault kind, read and checked by `load`.

The top of a file has defaults for its kinds: ``component``, ``source``, ``reference``,
``recommended_action``, ``attributed_to``, ``action``, and ``healthy``, a similar line that is no fault. Every kind has a ``title``, an
``unhealthy`` line and one of:

- ``match``: regular expressions to search for in a line. A group ``count`` is a number of errors: below ``least`` it is no fault.
- ``keys``: values of the group ``key`` of the file's ``family`` expression, such as the number of an Xid. A key without a kind is of kind
  ``other``; one in ``quiet`` is no fault.

The first match wins, in the order of `FILES`, then of the kinds in a file, then families.
"""

from __future__ import annotations

from typing import Final

from holdfast.detectors.signatures.loading import BadSignature, Signature, check, load

SIGNATURES: Final = load()
XIDS: Final = tuple(signature for signature in SIGNATURES if signature.place.partition(",")[0] == "xid.toml")
"""Numbered error reports of the NVIDIA driver."""

__all__ = ["SIGNATURES", "XIDS", "BadSignature", "Signature", "check", "load"]
