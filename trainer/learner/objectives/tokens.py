"""The input of an objective, tokens and data about their trajectories, and its output.

A trajectory whose context was cut has several samples, which may be in different micro-batches or on different ranks. The data that each
needs about the others is computed before any of them is trained: `other_samples`.

Notation of this package: mu the behaviour policy that sampled the tokens, pi the policy being trained, r = pi / mu of one token,
A the advantage, sg(x) x held constant. Shape suffix P: positions of one packed micro-batch.
"""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.batching.batch import Sample

LOG_RATIO_BOUND = 20.0
"""exp(20) is far outside any veto, and its square is still finite in fp32."""


@dataclass(frozen=True, slots=True)
class OtherSamples:
    """The data at each position about the other samples of its trajectory, which may be in other micro-batches."""

    vetoed_P: Tensor  # bool: another sample has a trained token with an impossible ratio
    log_ratio_sums_P: Tensor  # float32, nats: log r summed over their trained tokens
    num_tokens_P: Tensor  # float32: the number of those tokens


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a micro-batch. Log-probs and entropies are float32 in nats; untrained tokens are ignored.

    Gradients flow through `policy_logprobs_P`, and through `entropies_P` where the recipe has an entropy bonus.
    """

    policy_logprobs_P: Tensor
    behaviour_logprobs_P: Tensor
    advantages_P: Tensor  # float32
    trained_P: Tensor  # bool
    segments_P: Tensor  # int64: which sample, from 0
    entropies_P: Tensor
    # Log-probs under the weights at the start of the step. None: these are the present weights.
    proximal_logprobs_P: Tensor | None = None
    reference_logprobs_P: Tensor | None = None  # log-probs under the weights that the run started with
    # int64: the lag of the weights that sampled the token. None: all lags are 0.
    lags_P: Tensor | None = None
    other_samples: OtherSamples | None = None  # None: each sample is its trajectory's only one

    @property
    def log_ratios_P(self) -> Tensor:
        """log r, bounded; 0 where a token is not trained."""
        return self.bounded(self.policy_logprobs_P - self.behaviour_logprobs_P)

    def bounded(self, log_ratios_P: Tensor) -> Tensor:
        """Clamps log-ratios (nats) to +/- LOG_RATIO_BOUND, so that their exp is finite; 0 where a token is not trained."""
        return torch.where(self.trained_P, log_ratios_P, 0.0).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


@dataclass(frozen=True, slots=True)
class PerToken:
    """The values that an objective computes for each position. Untrained positions are dropped afterwards, and the rest is summed."""

    loss_P: Tensor
    # The factor on each token's policy gradient, without gradient, for the effective sample size. None: 1.
    weights_P: Tensor | None = None
    masked_P: Tensor | None = None  # bool: the token has no policy gradient. None: every token has one
    # Bool: no token of its trajectory has a policy gradient. None: no trajectory is vetoed
    vetoed_P: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """The numbers of an objective. A number that the objective does not use is NaN, so that any use of it is visible."""

    ratio_cap: float = math.nan
    ratio_floor: float = math.nan
    delta: float = math.nan
    anchor: float = math.nan
    veto_low: float = math.nan
    veto_high: float = math.nan
    clip_low: float = math.nan
    clip_high: float = math.nan
    dual_clip: float = math.nan

    @property
    def used(self) -> tuple[str, ...]:
        """The names of the numbers that are not NaN."""
        names = (field.name for field in dataclasses.fields(self))
        return tuple(name for name in names if not math.isnan(getattr(self, name)))


SAMPLES_AT_A_TIME = 64
"""The number of trajectories whose tokens one matrix separates: 16 MiB for 32,768 positions."""


@dataclass(frozen=True, slots=True)
class SampleRatios:
    """Sums over the trained tokens of one sample, or of several together."""

    log_ratio_sum: float = 0.0  # nats
    num_tokens: int = 0
    is_vetoed: bool = False  # whether one of its ratios is impossible

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
    """The mean of log r over the trained tokens of its trajectory at every position, without gradient."""
    sums_P = _summed(tokens.log_ratios_P.detach(), tokens)
    num_tokens_P = _summed(tokens.trained_P.float(), tokens)
    if tokens.other_samples is not None:
        sums_P = sums_P + tokens.other_samples.log_ratio_sums_P
        num_tokens_P = num_tokens_P + tokens.other_samples.num_tokens_P
    return sums_P / num_tokens_P.clamp(min=1)


def branched_samples(samples: Sequence[Sample]) -> list[int]:
    """Indices of the samples whose trajectory has several samples."""
    counts = Counter(sample.request_id for sample in samples)
    return [index for index, sample in enumerate(samples) if counts[sample.request_id] > 1]


def other_samples(
    samples: Sequence[Sample], logprobs: Sequence[npt.NDArray[np.float32]], bounds: Bounds
) -> list[SampleRatios]:
    """The ratios of all other samples of its trajectory, for each sample. `logprobs` are under the weights of the update."""
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
    """The sum of `values_P` over the sample of each position.

    It is computed by products with indicators, because sums by index depend on the order of threads on a GPU; for some samples at a time,
    because a micro-batch may hold thousands.
    """
    num_samples, device = int(tokens.segments_P[-1]) + 1, values_P.device
    sums_S = [
        (numbers[:, None] == tokens.segments_P).double() @ values_P.double()
        for numbers in torch.arange(num_samples, device=device).split(SAMPLES_AT_A_TIME)
    ]
    return torch.cat(sums_S).to(values_P.dtype)[tokens.segments_P]


def _is_impossible(ratios: Tensor, bounds: Bounds) -> Tensor:
    """Whether each ratio is impossible. None is if the objective has no veto, because a comparison with NaN is false."""
    return (ratios < bounds.veto_low) | (ratios > bounds.veto_high)
