"""Faults of network interfaces and InfiniBand ports."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from holdfast.detectors.catalogue import Attribution, RecommendedAction, fault_kind
from holdfast.detectors.evidence import Sample, Unknown
from holdfast.detectors.nodes.findings import HOUR, MINUTE, FaultFinding, ReadingPair, growths, listed
from holdfast.detectors.nodes.readings import CounterGrowth, IbPort, NetworkReading, Nic, NodeReading

_NIC: Final = Nic(
    name="eth0",
    wanted_up=True,
    state="up",
    carrier=True,
    speed=100_000,
    counters={"rx_crc_errors": 0, "carrier_down": 1},
    driver_counters={"rx_crc_errors_phy": 91, "link_down_events_phy": 2},
)
_PORT: Final = IbPort(
    device="mlx5_0",
    port=1,
    state="ACTIVE",
    physical_state="LinkUp",
    layer="InfiniBand",
    rate=400.0,
    counters={"symbol_error": 7, "link_downed": 3, "link_error_recovery": 0, "port_rcv_errors": 2},
)


def _look(at: float = 0.0, nic: dict[str, Any] | None = None, port: dict[str, Any] | None = None) -> NodeReading:
    nics, ports = (dataclasses.replace(_NIC, **nic or {}),), (dataclasses.replace(_PORT, **port or {}),)
    return NodeReading(node="n0", at=at, network=NetworkReading(nics=nics, ib_ports=ports))


def _hour_later(**facts: Any) -> Sample:  # noqa: ANN401 (of a port, or of an interface)
    return Sample(CounterGrowth(before=_look(), now=_look(3600.0, **facts)))


_define = partial(
    fault_kind,
    component="network",
    source="sysfs",
    attributed_to=Attribution.NETWORK,
    recommended_action=RecommendedAction.MONITOR,
    weight=58,
)
_COUNTERS: Final = "https://docs.kernel.org/admin-guide/abi-stable-files.html#abi-file-stable-sysfs-class-infiniband"
_STATISTICS: Final = "https://docs.kernel.org/networking/statistics.html"

NIC_DOWN: Final = _define(
    id="nic-link-down",
    title="A network interface is enabled and has no link",
    action="check cable, module and switch port; disable the interface if it is not used",
    reference="https://docs.kernel.org/networking/operstates.html",
    unhealthy=Sample(_look(nic={"state": "down", "carrier": False})),
    healthy=Sample(_look(nic={"wanted_up": False, "state": "down", "carrier": Unknown("Invalid argument")})),
)
NIC_FLAPPED: Final = _define(
    id="nic-link-flapped",
    title="A network interface lost its link since the previous reading",
    action="monitor; replace cable or module if it happens again",
    reference=_STATISTICS,
    unhealthy=_hour_later(nic={"driver_counters": {"rx_crc_errors_phy": 91, "link_down_events_phy": 3}}),
    healthy=_hour_later(),
)
NIC_ERRORS: Final = _define(
    id="nic-errors",
    title="A network interface receives corrupt frames",
    action="replace cable or module",
    reference=_STATISTICS,
    unhealthy=_hour_later(nic={"driver_counters": {"rx_crc_errors_phy": 1240, "link_down_events_phy": 2}}),
    healthy=_hour_later(nic={"driver_counters": {"rx_crc_errors_phy": 93, "link_down_events_phy": 2}}),
)
IB_DOWN: Final = _define(
    id="ib-port-down",
    title="An InfiniBand or RoCE port is not active",
    action="check cable, switch port and subnet manager; disable the port if it is not used",
    reference=_COUNTERS,
    unhealthy=Sample(_look(port={"state": "DOWN", "physical_state": "Polling"})),
    healthy=Sample(_look(port={"state": "DOWN", "physical_state": "Disabled"})),
)
IB_SLOW: Final = _define(
    id="ib-rate-low",
    title="An InfiniBand port runs slower than before",
    action="reseat or replace the cable; replace the node if it stays",
    reference=_COUNTERS,
    unhealthy=_hour_later(port={"rate": 100.0}),
    healthy=_hour_later(port={"rate": 400.0}),
)
IB_FLAPPED: Final = _define(
    id="ib-link-flapped",
    title="An InfiniBand link went down or was retrained since the previous reading",
    action="monitor; replace the cable if it happens again",
    reference=_COUNTERS,
    unhealthy=_hour_later(port={"counters": {"symbol_error": 7, "link_downed": 4, "link_error_recovery": 0, "port_rcv_errors": 2}}),
    healthy=_hour_later(),
)
IB_SYMBOLS: Final = _define(
    id="ib-symbol-errors",
    title="An InfiniBand link has a high symbol error rate",
    action="clean or replace the cable",
    reference=_COUNTERS,
    unhealthy=_hour_later(port={"counters": {"symbol_error": 547, "link_downed": 3, "link_error_recovery": 0, "port_rcv_errors": 2}}),
    healthy=_hour_later(port={"counters": {"symbol_error": 87, "link_downed": 3, "link_error_recovery": 0, "port_rcv_errors": 2}}),
)
IB_ERRORS: Final = _define(
    id="ib-port-errors",
    title="An InfiniBand port receives corrupt packets",
    action="monitor; replace the cable if it continues",
    reference=_COUNTERS,
    unhealthy=_hour_later(port={"counters": {"symbol_error": 7, "link_downed": 3, "link_error_recovery": 0, "port_rcv_errors": 882}}),
    healthy=_hour_later(port={"counters": {"symbol_error": 7, "link_downed": 3, "link_error_recovery": 0, "port_rcv_errors": 12}}),
)

DOWN_STATES: Final = frozenset({"down", "lowerlayerdown", "notpresent"})
_NIC_BROKEN: Final = ("rx_crc_errors", "rx_frame_errors")
_PHY_BROKEN: Final = ("rx_crc_errors_phy", "rx_pcs_symbol_err_phy", "rx_symbol_err_phy")
_IB_FLAPS: Final = ("link_downed", "link_error_recovery")
_IB_BROKEN: Final = ("port_rcv_errors", "local_link_integrity_errors", "excessive_buffer_overrun_errors", "rx_icrc_encapsulated")


def judge_network(pair: ReadingPair[NetworkReading]) -> Iterator[FaultFinding]:
    """Yield faults of a node's network."""
    before = pair.before
    if not isinstance(pair.now.nics, Unknown):
        old_nics = {} if before is None or isinstance(before.nics, Unknown) else {nic.name: nic for nic in before.nics}
        for nic in pair.now.nics:
            yield from _nic(ReadingPair(now=nic, before=old_nics.get(nic.name), seconds=pair.seconds, limits=pair.limits))
    if not isinstance(pair.now.ib_ports, Unknown):
        old_ports = {} if before is None or isinstance(before.ib_ports, Unknown) else {_name(port): port for port in before.ib_ports}
        for port in pair.now.ib_ports:
            yield from _port(ReadingPair(now=port, before=old_ports.get(_name(port)), seconds=pair.seconds, limits=pair.limits))


def _name(port: IbPort) -> str:
    return f"{port.device}/{port.port}"


def _nic(pair: ReadingPair[Nic]) -> Iterator[FaultFinding]:
    nic, old = pair.now, pair.before
    if nic.wanted_up is True and (nic.carrier is False or nic.state in DOWN_STATES):
        yield FaultFinding(kind=NIC_DOWN.id, part=nic.name, quote=f"{nic.name}: no link, state {nic.state}")
    if old is None:
        return
    flaps = {
        **growths(old.counters, nic.counters, ["carrier_down"]),
        **growths(old.driver_counters, nic.driver_counters, ["link_down_events_phy"]),
    }
    if flaps:
        yield FaultFinding(kind=NIC_FLAPPED.id, part=nic.name, quote=f"{nic.name}: {listed(flaps)}")
    broken = {**growths(old.counters, nic.counters, _NIC_BROKEN), **growths(old.driver_counters, nic.driver_counters, _PHY_BROKEN)}
    if broken and pair.rate(max(broken.values()), MINUTE) > pair.limits.nic_errors_per_minute:
        yield FaultFinding(kind=NIC_ERRORS.id, part=nic.name, quote=f"{nic.name}: {listed(broken)} in {pair.seconds:.0f} s")


def _port(pair: ReadingPair[IbPort]) -> Iterator[FaultFinding]:
    port, old, name = pair.now, pair.before, _name(pair.now)
    if not isinstance(port.state, Unknown) and port.state != "ACTIVE" and port.physical_state != "Disabled":
        yield FaultFinding(kind=IB_DOWN.id, part=name, quote=f"{name}: {port.state}, {port.physical_state}")
    if old is None:
        return
    if not isinstance(port.rate, Unknown) and not isinstance(old.rate, Unknown) and port.rate < old.rate:
        yield FaultFinding(kind=IB_SLOW.id, part=name, quote=f"{name}: {port.rate:g} Gbit/s, {old.rate:g} before")
    if flaps := growths(old.counters, port.counters, _IB_FLAPS):
        yield FaultFinding(kind=IB_FLAPPED.id, part=name, quote=f"{name}: {listed(flaps)}")
    yield from _rates(pair, name, old)


def _rates(pair: ReadingPair[IbPort], name: str, old: IbPort) -> Iterator[FaultFinding]:
    """Check errors by their rate, as a good link has some."""
    symbols = growths(old.counters, pair.now.counters, ["symbol_error"])
    if pair.rate(sum(symbols.values()), HOUR) > pair.limits.ib_symbol_errors_per_hour:
        yield FaultFinding(kind=IB_SYMBOLS.id, part=name, quote=f"{name}: {listed(symbols)} in {pair.seconds:.0f} s")
    broken = growths(old.counters, pair.now.counters, _IB_BROKEN)
    if broken and pair.rate(max(broken.values()), HOUR) > pair.limits.ib_port_errors_per_hour:
        yield FaultFinding(kind=IB_ERRORS.id, part=name, quote=f"{name}: {listed(broken)} in {pair.seconds:.0f} s")
