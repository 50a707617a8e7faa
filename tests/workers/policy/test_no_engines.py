"""A worker without engines gives back what needs them, and spends no try of it."""

import pytest

from pipeline.errors import EngineError
from tests.workers.agent.episode import claim
from workers.breaker import Breakers
from workers.policy.requested import NoEngines, RequestedPolicies


async def test_a_request_that_needs_engines_goes_back_uncounted_and_another_s_failure_counts() -> None:
    engines = NoEngines()
    gates = Breakers({}, gates={"engine": engines})
    needy = claim()
    with pytest.raises(EngineError, match="no engines"):
        await RequestedPolicies(engines, endpoints=engines).open(needy)
    assert await gates.blamed("engine", needy.request.id, "this worker has no engines")
    assert not await gates.blamed("engine", "of-an-endpoint", "the server is broken")
    assert "SWERVE_ROUTER_URL is empty" in gates.set_aside
    assert gates.room(4) == 4
    gates.ended(needy.request.id)
    assert not await gates.blamed("engine", needy.request.id, "it is remembered no longer than its claim")
