"""How an order is turned down."""

from __future__ import annotations


class Refused(Exception):
    """An order that cannot be carried out, and why."""
