"""How busy the GPU of each rank is, by what the rank does at the time.

Once a second a thread of each rank asks NVML, through torch, for the share of the time in which a kernel ran on its device (NVML measures
over an interval between a sixth of a second and a second). The sample is booked on the call of the learner that the rank is in, or on
`WAITING`. Without a GPU no thread starts, and without the package nvidia-ml-py nothing is sampled.
"""

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import distributed

from pipeline.journal.rows import RankUse
from trainer.learner import backend

log = logging.getLogger(__name__)

SAMPLE_S = 1.0
WAITING = "waiting"
DOING = {
    "step": "training",
    "accumulate": "training",
    "apply": "training",
    "logprobs_under": "audit",
    "begin_save": "checkpoint",
    "finish_save": "checkpoint",
}
"""What a call of the learner is called in the journal; others have their own names."""


class GpuUse:
    """The samples of one rank since they were last gathered. `read` returns the share, 0 to 1; None: there is nothing to sample."""

    def __init__(self, read: Callable[[], float] | None) -> None:
        self.is_sampled = read is not None
        self._doing = WAITING
        self._lock = threading.Lock()
        self._num_samples: Counter[str] = Counter()
        self._busy: Counter[str] = Counter()  # sums of shares
        if read is not None:
            threading.Thread(target=self._sample_on, args=(read,), name="gpu use", daemon=True).start()

    @classmethod
    def of_this_device(cls) -> "GpuUse":
        """The use of the device of this process."""
        if not backend.has_cuda():
            return cls(None)
        device = torch.cuda.current_device()

        def read() -> float:
            return torch.cuda.utilization(device) / 100

        try:
            read()
        except Exception as error:
            log.warning("GPU use is not recorded (%s); `pip install nvidia-ml-py` makes it known", error)
            return cls(None)
        return cls(read)

    @contextlib.contextmanager
    def during(self, call: str) -> Generator[None]:
        """Books samples on this call of the learner inside the block."""
        self._doing = DOING.get(call, call)
        try:
            yield
        finally:
            self._doing = WAITING

    def sample(self, share: float) -> None:
        """Books one sample on what the rank does now."""
        with self._lock:
            self._num_samples[self._doing] += 1
            self._busy[self._doing] += share  # pyright: ignore[reportArgumentType] - a counter of floats

    def gathered(self) -> tuple[RankUse, ...]:
        """The samples of all ranks since the last call, which every rank makes together; in order."""
        with self._lock:
            mine = RankUse(
                rank=distributed.get_rank(), num_samples=dict(self._num_samples), busy=dict(self._busy)
            )
            self._num_samples.clear()
            self._busy.clear()
        everywhere: list[Any] = [mine] * distributed.get_world_size()
        if len(everywhere) > 1:
            distributed.all_gather_object(everywhere, mine, group=backend.host_group())
        return tuple(everywhere)

    def _sample_on(self, read: Callable[[], float]) -> None:
        while True:
            time.sleep(SAMPLE_S)
            try:
                self.sample(read())
            except Exception:
                log.warning("GPU use is not recorded any more", exc_info=True)
                return
