"""What the kernel itself says of a network device that a line of its log names: a counter may contradict the line, or confirm it.

A driver writes `Link down` of any port, in use or not, and syslog may repeat an old line. The kernel counts each loss of a link: one that
has not been counted has not happened. What cannot be measured (no such file, a container that does not see the machine's interfaces, no
answer in time) says nothing of the line.
Counters: https://docs.kernel.org/admin-guide/abi-testing-files.html#abi-file-testing-sysfs-class-net,
https://docs.kernel.org/admin-guide/abi-stable-files.html#abi-file-stable-sysfs-class-infiniband
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from holdfast.detectors.associations import belongs
from holdfast.detectors.catalogue import CATALOGUE, Area
from holdfast.detectors.evidence import Number, Unknown
from holdfast.detectors.nodes.line_check import LineCheck

_BUS: Final = re.compile(r"\b(?:[0-9a-f]{4,8}:)[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b", re.IGNORECASE)
_WORD: Final = re.compile(r"[A-Za-z][\w.-]*")
_LINK_NAME: Final = re.compile(r"(?:eth\d+|en[opsx]\w+|ib\d+|ibs\w+|bond\d+|mlx[45]_\d+)")
"""Names that only a network device has: one that the node does not have is a device of another machine."""
_PORT: Final = re.compile(r"[/ ](?:port )?(\d+)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A network interface, or a port of an InfiniBand or RoCE adapter."""

    name: str
    """`ens1f0np0`, or `mlx5_0/1`."""
    bus: str = ""
    """PCI address of its card, in small letters; empty for a virtual interface."""
    up: bool | Unknown
    """Whether it has a carrier, or its port is active; an interface that is switched off is not up."""
    downs: Number
    """How often it has lost its link since its driver was loaded."""
    addresses: tuple[str, ...] | Unknown = ()
    """Addresses of the interface, and of those that are stacked on it; of a port none."""
    stacked: bool = False
    """Another interface (a bond, a bridge, a VLAN) sends through it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReading:
    """All network devices of a node that a process sees."""

    links: tuple[Link, ...] | Unknown
    buses: tuple[str, ...] | Unknown
    """PCI addresses of all devices of the machine."""
    adapters: dict[str, str] | Unknown
    """Adapter to the PCI address of its card."""
    is_host: bool
    """The interfaces are those of the machine, and not of a container."""


def is_about_link(kind: str) -> bool:
    """Return whether a line of *kind* is about a network device, of which the kernel can be asked."""
    return CATALOGUE[kind].area is Area.NETWORK


def check_link_line(kind: str, text: str, earlier: Sequence[LinkReading], now: LinkReading, seconds: float) -> LineCheck:
    """Return what *now*, read after the line *text*, says of the devices that it names.

    It is compared with the last of the *earlier* readings, which may be none; *seconds* lie between the two.
    """
    if earlier and (absent := _absent(text, [*earlier, now])):
        return LineCheck(contradicted=f"this node has no {absent}")
    links, old = _named(text, now), {one.name: one for one in _named(text, earlier[-1])} if earlier else {}
    if not links and not old:
        return LineCheck()
    known = [*links, *old.values()]
    addresses = [one.addresses for one in known if not isinstance(one.addresses, Unknown)]
    cards = {_card(one.bus) for one in known if one.bus}
    adapters = {} if isinstance(now.adapters, Unknown) else now.adapters
    used = LineCheck(
        addresses=tuple(dict.fromkeys(one for some in addresses for one in some))
        if len(addresses) == len(known)
        else Unknown("the addresses of an interface could not be read"),
        adapters=tuple(name for name, bus in adapters.items() if _card(bus) in cards),
        stacked=any(one.stacked for one in known),
    )
    return _with_state(used, links, old, seconds) if belongs(kind, "link-down") else used


def _with_state(check: LineCheck, links: list[Link], old: dict[str, Link], seconds: float) -> LineCheck:
    """Return *check* with what the state and the counters of *links* say of a line about a link that is down."""
    lost = {one.name: _losses(one, old.get(one.name)) for one in links}
    down = [one.name for one in links if one.up is False]
    moved = {name: count for name, count in lost.items() if count}
    if moved or down:
        words = [f"{name} has no link" for name in down]
        words += [f"{name} lost its link {f'{count} times' if count > 1 else 'once'} in {seconds:.0f} s" for name, count in moved.items()]
        return replace(check, supported=", ".join(words))
    if links and all(one.up is True for one in links) and all(count == 0 for count in lost.values()):
        names = " and ".join(one.name for one in links)
        return replace(check, contradicted=f"by its counter {names} did not lose its link in {seconds:.0f} s around the line, and it is up")
    return check


def _losses(now: Link, before: Link | None) -> int | None:
    """Return how often a link was lost in between; None where that is not known: a smaller count means that the counter was reset."""
    if before is None or isinstance(before.downs, Unknown) or isinstance(now.downs, Unknown) or now.downs < before.downs:
        return None
    return now.downs - before.downs


def _absent(text: str, readings: Sequence[LinkReading]) -> str:
    """Return the device that *text* names and that the node never had in *readings*; empty if there is none, or if that is not known."""
    if named := sorted({found.lower() for found in _BUS.findall(text)}):
        known = [one.buses for one in readings]
        if any(isinstance(one, Unknown) or not one for one in known):
            return ""
        seen = {bus for buses in known if not isinstance(buses, Unknown) for bus in buses}
        return "" if seen & set(named) else ", ".join(named)
    names = [word for word in _words(text) if _LINK_NAME.fullmatch(word)]
    if not names or any(not one.is_host or isinstance(one.links, Unknown) for one in readings):
        return ""
    seen = {link.name.partition("/")[0] for one in readings if not isinstance(one.links, Unknown) for link in one.links}
    return "" if seen & set(names) else names[0]


def _words(text: str) -> list[str]:
    return [found.rstrip(".-") for found in _WORD.findall(text)]


def _named(text: str, reading: LinkReading) -> list[Link]:
    """Return the links of *reading* that *text* names: by their names, else by the PCI address of their card."""
    links = () if isinstance(reading.links, Unknown) else reading.links
    words = set(_words(text))
    if by_name := [one for one in links if _is_named(one.name, text, words)]:
        return by_name
    buses = {found.lower() for found in _BUS.findall(text)}
    return [one for one in links if one.bus in buses]


def _is_named(name: str, text: str, words: Collection[str]) -> bool:
    device, _, port = name.partition("/")
    if device not in words:
        return False
    said = _PORT.match(text.partition(device)[2].lstrip(":")) if port else None
    return said is None or said[1] == port


def _card(bus: str) -> str:
    """Return a PCI address without its function: the ports of a card share their adapters when they are bonded."""
    return bus.rpartition(".")[0]
