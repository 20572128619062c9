"""A servicer without a server."""

from collections.abc import AsyncIterator

import pytest

from tests.unit.worker.rpc.served_worker import Served


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served()
    served.servicer.fence.claim(5)
    yield served
    served.core.gate.set()
    await served.servicer.close()
