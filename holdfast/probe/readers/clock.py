"""What the kernel knows of its own clock: `adjtimex`, asked and never set; see adjtimex(2)."""

from __future__ import annotations

import ctypes
import os
from typing import Final

from detectors.evidence import Unknown
from detectors.readings import ClockReading

UNSYNCHRONIZED: Final = 0x0040
NANOSECONDS: Final = 0x2000
"""Bits of the status: nobody keeps the clock; its offset is in nanoseconds rather than microseconds."""


class _Timex(ctypes.Structure):
    """`struct timex` of 64-bit Linux, with room to spare behind what is read of it."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("frequency", ctypes.c_long),
        ("worst", ctypes.c_long),
        ("estimated", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 64),
    )


def read_clock() -> ClockReading | Unknown:
    """Return whether this node's clock is kept in step, and how far off it may be."""
    asked = _Timex()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.adjtimex(ctypes.byref(asked)) < 0:
        return Unknown(f"adjtimex: {os.strerror(ctypes.get_errno())}")
    status = int(asked.status)
    return ClockReading(
        synchronized=not status & UNSYNCHRONIZED, offset=asked.offset / (1e9 if status & NANOSECONDS else 1e6), worst=asked.worst / 1e6
    )
