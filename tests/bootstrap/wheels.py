"""Wheels of versions of Holdfast that there are not."""

from __future__ import annotations

import pytest

from holdfast import __version__
from holdfast.bootstrap import NodeWheel, node_wheel, wheel
from holdfast.protocol import PROTOCOL

SPEAKS = b"PROTOCOL: Final = %d\n"


def newer(protocol: int = PROTOCOL) -> NodeWheel:
    """Return a wheel of another version, which speaks *protocol*."""
    files = {name: data.replace(f'"{__version__}"'.encode(), b'"9.9"') for name, data in wheel._sources().items()}
    assert SPEAKS % PROTOCOL in files["holdfast/protocol.py"]
    files["holdfast/protocol.py"] = files["holdfast/protocol.py"].replace(SPEAKS % PROTOCOL, SPEAKS % protocol)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wheel, "__version__", "9.9")
        patch.setattr(wheel, "PROTOCOL", protocol, raising=False)
        patch.setattr(wheel, "_sources", lambda: files)
        return node_wheel.__wrapped__()
