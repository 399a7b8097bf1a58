"""Real ranks of managed groups, as the tests of the runtime have them, and a record of each outcome as soon as it is known."""

from __future__ import annotations

from tests.gpu.record import pytest_collection_finish, pytest_runtest_logreport, pytest_runtest_logstart  # noqa: F401 (hooks)
from tests.runtime.conftest import _no_agent_around, agent, job  # noqa: F401 (fixtures)
