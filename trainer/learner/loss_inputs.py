"""What the loss is computed from beside the model's output: numbers per sample, laid out over the positions of a micro-batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trainer.batching.batch import Batch
from trainer.batching.packing import MicroBatch
from trainer.learner.forward import Logprobs, to_device
from trainer.learner.lag_sums import lags_of
from trainer.learner.objectives.tokens import OtherSamples, Tokens
from trainer.learner.objectives.trajectories import SampleRatios


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Of some samples. Each list has one entry per sample; None where the loss does not use it."""

    temperature: float
    # Versions behind the newest by weight version, as the batch has them.
    lags: Mapping[int, int] = field(default_factory=dict[int, int])
    reference: Logprobs | None = None  # under the weights that the run started with
    # Under the weights at the start of the step; None: they are the present ones.
    proximal: Logprobs | None = None
    other_samples: Sequence[SampleRatios] | None = None  # of each sample's trajectory
    # Of each sample's tokens: objectives/aggregation.py.
    factors: Sequence[float] | None = None

    @classmethod
    def of(cls, batch: Batch, *, reference: Logprobs | None, proximal: Logprobs | None) -> "LossInputs":
        return cls(batch.temperature, batch.lags, reference, proximal)

    def chosen(self, indices: Sequence[int]) -> "LossInputs":
        """Those of the samples at `indices`."""
        return replace(
            self,
            reference=None if self.reference is None else [self.reference[index] for index in indices],
            proximal=None if self.proximal is None else [self.proximal[index] for index in indices],
        )

    def tokens(self, microbatch: MicroBatch, logprobs_P: Tensor, entropies_P: Tensor) -> Tokens:
        """The tokens of a micro-batch of these samples, with the log-probs and entropies that the model gave."""
        return Tokens(
            policy_logprobs_P=logprobs_P,
            behaviour_logprobs_P=to_device(microbatch.behaviour_logprobs_P),
            advantages_P=to_device(microbatch.advantages_P),
            trained_P=to_device(microbatch.trained_P),
            segments_P=to_device(microbatch.segments_P),
            entropies_P=entropies_P,
            proximal_logprobs_P=_joined(self.proximal, microbatch),
            reference_logprobs_P=_joined(self.reference, microbatch),
            lags_P=to_device(lags_of(microbatch.versions_P, self.lags)),
            other_samples=self._other_samples(microbatch),
        )

    def factors_of(self, microbatch: MicroBatch) -> Tensor | None:
        """At each position the factor of its sample."""
        return None if self.factors is None else _repeated(self.factors, microbatch, np.float32)

    def _other_samples(self, microbatch: MicroBatch) -> OtherSamples | None:
        if self.other_samples is None:
            return None
        others = self.other_samples
        return OtherSamples(
            vetoed_P=_repeated([one.is_vetoed for one in others], microbatch, np.bool_),
            log_ratio_sums_P=_repeated([one.log_ratio_sum for one in others], microbatch, np.float32),
            num_tokens_P=_repeated([one.num_tokens for one in others], microbatch, np.float32),
        )


def _repeated(of_samples: Sequence[float], microbatch: MicroBatch, dtype: npt.DTypeLike) -> Tensor:
    """At each position the number of its sample."""
    values_S: npt.NDArray[Any] = np.array([of_samples[index] for index in microbatch.samples] or [0], dtype)
    return to_device(values_S[microbatch.segments_P])


def _joined(logprobs: Logprobs | None, microbatch: MicroBatch) -> Tensor | None:
    """Log-probs of the targets at each position."""
    if logprobs is None:
        return None
    values = [logprobs[index][1:] for index in microbatch.samples]
    return to_device(np.concatenate(values) if values else np.zeros(microbatch.num_positions, np.float32))
