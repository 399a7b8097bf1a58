"""Real agents for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.agent.memory_rig import MemoryNode
from tests.agent.rig import Flow, Node


@pytest.fixture
def new_node(tmp_path: Path) -> Iterator[Node]:
    """Give a node whose agent the test starts itself."""
    node = Node(tmp_path)
    yield node
    node.end()


@pytest.fixture
def node(new_node: Node) -> Node:
    """Give a node with an agent."""
    return new_node.begin()


@pytest.fixture
def flow(node: Node) -> Iterator[Flow]:
    """Give a flow that is attached to the agent."""
    with node.flow() as flow:
        yield flow.attach(0)


@pytest.fixture
def make() -> Iterator[Callable[..., MemoryNode]]:
    """Give a way to make nodes."""
    made: list[MemoryNode] = []

    def begin(name: str, *, limit: int = 2**33) -> MemoryNode:
        made.append(MemoryNode(name, limit=limit))
        return made[-1].begin()

    yield begin
    for node in made:
        node.end()
