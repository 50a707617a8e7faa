"""When an engine counts as late, which on a busy machine would be decided by the machine."""

import pytest

from tests.trainer.weights.run_of_weights import FOREVER_S
from trainer.weights import deliveries


@pytest.fixture(autouse=True)
def _no_engine_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that needs one says after how many seconds."""
    monkeypatch.setattr(deliveries, "LATE_S", FOREVER_S)
