"""How busy GPUs are is booked on what their ranks do, and gathered over all ranks. What NVML says is given here."""

import logging
import threading

import pytest

from pipeline.journal.rows import RankUse
from trainer.learner import gpu_use
from trainer.learner.gpu_use import GpuUse


def test_a_sample_belongs_to_the_call_that_the_rank_is_in() -> None:
    use = GpuUse(None)
    with use.during("step"):
        use.sample(0.75)
        use.sample(0.25)
    use.sample(0.5)
    with use.during("export"):
        use.sample(1.0)
    (mine,) = use.gathered()
    assert [mine.share(doing) for doing in ("training", "waiting", "export", "audit")] == [0.5, 0.5, 1.0, None]
    assert use.gathered() == (RankUse(rank=0, num_samples={}, busy={}),), "they were gathered already"


def test_a_device_is_sampled_until_it_cannot_be_asked_any_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gpu_use, "SAMPLE_S", 0.001)
    answers = [0.5, 1.0]
    use = GpuUse(lambda: answers.pop(0))

    with caplog.at_level(logging.WARNING):
        for thread in [one for one in threading.enumerate() if one.name == "gpu use"]:
            thread.join()
    assert "not recorded any more" in caplog.text
    (mine,) = use.gathered()
    assert (mine.num_samples, mine.busy) == ({"waiting": 2}, {"waiting": 1.5})


def test_without_a_gpu_nothing_is_sampled() -> None:
    use = GpuUse.of_this_device()
    assert not use.is_sampled
