"""Run: python -m pytest -p tests.runtime.conftest /tmp/lead/failing/test_second_buddy.py --timeout=25"""

import select
import pytest
from tests.runtime.test_groups_council import Table, vote
from tests.waiting import wait_until


@pytest.mark.parametrize("lost", [1, 2, 3, 4, 5, 6, 7])
def test_a_rank_known_to_be_gone_does_not_keep_light_states_from_the_other_buddy(lost):
    """vote(): _peer(first buddy) raises before the second buddy was sent anything, and that one waits for it."""
    sitting = Table(8, 2)
    sitting.sit()
    sitting.councils[lost].close()
    left = [r for r in range(8) if r != lost]

    def known():
        for r in left:
            peer = sitting.councils[r].peers.get(lost)
            if peer is not None and not peer.gone:
                peer.pump(select.POLLIN)
        return all(p is None or p.gone for p in (sitting.councils[r].peers.get(lost) for r in left))

    wait_until(known, seconds=5)
    assert sitting.all(lambda one: vote(one, {}), ranks=left) == [{"ok": False}] * 7
    sitting.close()
