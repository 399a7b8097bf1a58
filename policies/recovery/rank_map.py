"""Which node each rank is on, looked up in constant time: a decision costs as much on 8,000 nodes as on eight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet


class RankMap(Mapping[str, tuple[int, ...]]):
    """Node to its ranks, with the node of each rank, the number of ranks, and the most on one node kept up to date."""

    def __init__(self, ranks: Mapping[str, Iterable[int]]) -> None:
        self._ranks = {node: tuple(some) for node, some in ranks.items()}
        self._node_of = {rank: node for node, some in self._ranks.items() for rank in some}
        self._sizes = Counter(map(len, self._ranks.values()))

    def __getitem__(self, node: str) -> tuple[int, ...]:
        return self._ranks[node]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, node: object) -> bool:
        return node in self._ranks

    @property
    def total(self) -> int:
        """Return the number of ranks."""
        return len(self._node_of)

    @property
    def most(self) -> int:
        """Return the largest number of ranks on one node; 1 if there are none."""
        return max(self._sizes, default=1)

    def node_of(self, rank: int) -> str | None:
        """Return the node of *rank*; None if there is no such rank."""
        return self._node_of.get(rank)

    def ranks(self) -> AbstractSet[int]:
        """Return all ranks."""
        return self._node_of.keys()

    def place(self, rank: int, node: str) -> None:
        """Put *rank* on *node*, away from the one that it is on; a node without ranks is forgotten."""
        self.drop(rank)
        self._resize(node, (*self._ranks.get(node, ()), rank))
        self._node_of[rank] = node

    def drop(self, rank: int) -> None:
        """Forget *rank*, if there is such a rank."""
        node = self._node_of.pop(rank, None)
        if node is not None:
            self._resize(node, tuple(one for one in self._ranks[node] if one != rank))

    def _resize(self, node: str, ranks: tuple[int, ...]) -> None:
        before = self._ranks.get(node)
        if before is not None:
            self._sizes[len(before)] -= 1
            if not self._sizes[len(before)]:
                del self._sizes[len(before)]
        if ranks:
            self._ranks[node] = ranks
            self._sizes[len(ranks)] += 1
        else:
            self._ranks.pop(node, None)


def in_order(wanted: AbstractSet[str], among: Iterable[str]) -> tuple[str, ...]:
    """Return the *wanted* names that are *among* others, in their order; at most one is found without looking at the others in turn."""
    among = among if isinstance(among, Container) else tuple(among)
    found = {one for one in wanted if one in among}
    return tuple(found) if len(found) < 2 else tuple(one for one in among if one in found)  # noqa: PLR2004 (one name has no order)
