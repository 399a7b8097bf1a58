"""The proxy of a node: commands of its own, over the pipes on which a controller's transport reaches it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from holdfast.agent import schema
from holdfast.agent.node.proxy import ProxyServer
from holdfast.protocol import Message, decode, encode


def test_a_ping_is_answered(tmp_path: Path) -> None:
    """Once the node is known, which the first ping comes before."""
    (source, commands), (answers, sink) = os.pipe(), os.pipe()
    server = threading.Thread(target=ProxyServer(source, sink).run, daemon=True)
    server.start()
    with os.fdopen(answers, "rb") as lines:

        def answer(command: Message) -> Message:
            os.write(commands, b"0 " + encode(command))
            return decode(lines.readline().removeprefix(b"0 "))

        lines.readline()  # the greeting
        assert answer({"id": 1, "do": "ping"})["ok"] is False
        assert answer({"id": 2, "do": "select-node", "directory": str(tmp_path), "node": "n", "cluster": "c"})["ok"] is True
        assert answer({"id": 3, "do": "ping"}) == {"re": 3, "ok": True}
        os.close(commands)
        server.join(30)
    os.close(source)
    os.close(sink)


@pytest.mark.parametrize("name", sorted(ProxyServer(-1, -1)._commands))
def test_the_fields_of_each_command_can_be_read(name: str) -> None:
    """None of them is declared in a way that fails for every message."""
    try:
        schema.read_fields(ProxyServer(-1, -1)._commands[name], {"do": name, "id": 1})
    except schema.BadField as error:
        assert "it is missing" in str(error)  # noqa: PT017
