"""What a network driver counts beside the kernel's own counters: `ethtool -S`, asked of the kernel itself.

The layout of the questions is that of linux/ethtool.h, which is part of the kernel's promise to programs.
"""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct
from typing import Final

from detectors.evidence import Unknown
from detectors.readings import Counters

SIOCETHTOOL: Final = 0x8946
GET_SET_SIZES: Final = 0x37
GET_NAMES: Final = 0x1B
GET_VALUES: Final = 0x1D
STATISTICS: Final = 1
"""The set of strings that names the counters (ETH_SS_STATS)."""
NAME: Final = 32
"""Bytes of one name (ETH_GSTRING_LEN)."""


def driver_counters(interface: str) -> Counters | Unknown:
    """Return the counters of *interface*'s driver."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            count = _count(asked, interface)
            names = _ask(asked, interface, struct.pack("=III", GET_NAMES, STATISTICS, count), count * NAME)
            values = _ask(asked, interface, struct.pack("=II", GET_VALUES, count), count * 8)
    except OSError as error:
        return Unknown(f"ethtool {interface}: {error.strerror or error}")
    words = (names[at : at + NAME].partition(b"\0")[0].decode(errors="replace").strip() for at in range(0, len(names), NAME))
    return dict(zip(words, struct.unpack(f"={count}Q", values), strict=False))


def _count(asked: socket.socket, interface: str) -> int:
    """Return how many counters there are."""
    answer = _ask(asked, interface, struct.pack("=IIQ", GET_SET_SIZES, 0, 1 << STATISTICS), 4)
    return int(struct.unpack("=I", answer)[0])


def _ask(asked: socket.socket, interface: str, question: bytes, room: int) -> bytes:
    """Put *question* to the driver and return the *room* bytes of answer behind it."""
    buffer = ctypes.create_string_buffer(question, len(question) + room)
    request = struct.pack("16sP16x", interface.encode()[:15], ctypes.addressof(buffer))
    fcntl.ioctl(asked, SIOCETHTOOL, request)
    return buffer.raw[len(question) :]
