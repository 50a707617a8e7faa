"""What an objective has to know of a whole trajectory.

A trajectory whose context was cut has several samples, which may lie in different micro-batches or on different ranks. What they
have to know of each other is computed before any of them is trained: `other_samples`.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.batching.batch import Sample
from trainer.learner.objectives.tokens import LOG_RATIO_BOUND, Bounds, Tokens


@dataclass(frozen=True, slots=True)
class SampleRatios:
    """Of the trained tokens of one sample, or of several together."""

    log_ratio_sum: float = 0.0  # nats
    num_tokens: int = 0
    is_vetoed: bool = False  # one of its ratios is impossible

    def __add__(self, other: "SampleRatios") -> "SampleRatios":
        return SampleRatios(
            self.log_ratio_sum + other.log_ratio_sum,
            self.num_tokens + other.num_tokens,
            self.is_vetoed or other.is_vetoed,
        )


def vetoed(tokens: Tokens, bounds: Bounds) -> Tensor:
    """True for every position of a trajectory in which the ratio of a trained token is impossible."""
    outside_P = tokens.trained_P & _is_impossible(tokens.log_ratios_P.detach().exp(), bounds)
    vetoed_P = _summed(outside_P.long(), tokens) > 0
    others = tokens.other_samples
    return vetoed_P if others is None else others.vetoed_P | vetoed_P


def mean_log_ratios(tokens: Tokens) -> Tensor:
    """At every position the mean of log r over the trained tokens of its trajectory, without gradient."""
    sums_P = _summed(tokens.log_ratios_P.detach(), tokens)
    num_tokens_P = _summed(tokens.trained_P.float(), tokens)
    if tokens.other_samples is not None:
        sums_P = sums_P + tokens.other_samples.log_ratio_sums_P
        num_tokens_P = num_tokens_P + tokens.other_samples.num_tokens_P
    return sums_P / num_tokens_P.clamp(min=1)


def branched_samples(samples: Sequence[Sample]) -> list[int]:
    """Indices of those that are not their trajectory's only one."""
    counts = Counter(sample.request_id for sample in samples)
    return [index for index, sample in enumerate(samples) if counts[sample.request_id] > 1]


def other_samples(
    samples: Sequence[Sample], logprobs: Sequence[npt.NDArray[np.float32]], bounds: Bounds
) -> list[SampleRatios]:
    """For each sample, the ratios of all other samples of its trajectory. `logprobs` are under the weights of the update."""
    ratios = [_ratios(sample, values_T, bounds) for sample, values_T in zip(samples, logprobs, strict=True)]
    together: defaultdict[str, list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        together[sample.request_id].append(index)
    return [
        sum((ratios[other] for other in together[sample.request_id] if other != index), SampleRatios())
        for index, sample in enumerate(samples)
    ]


def _ratios(sample: Sample, logprobs_T: npt.NDArray[np.float32], bounds: Bounds) -> SampleRatios:
    log_ratios_T = (logprobs_T - sample.behaviour_logprobs_T)[sample.trained_T]
    bounded_T = torch.from_numpy(log_ratios_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return SampleRatios(
        log_ratio_sum=float(bounded_T.double().sum()),
        num_tokens=len(log_ratios_T),
        is_vetoed=bool(_is_impossible(bounded_T.exp(), bounds).any()),
    )


def _summed(values_P: Tensor, tokens: Tokens) -> Tensor:
    """At every position the sum of `values_P` over its sample."""
    num_segments = int(tokens.segments_P[-1]) + 1
    sums_S = torch.zeros(num_segments, dtype=values_P.dtype, device=values_P.device)
    sums_S.index_add_(0, tokens.segments_P, values_P)
    return sums_S[tokens.segments_P]


def _is_impossible(ratios: Tensor, bounds: Bounds) -> Tensor:
    """Nothing is where the objective has no veto: a comparison with what is not a number is false."""
    return (ratios < bounds.veto_low) | (ratios > bounds.veto_high)
