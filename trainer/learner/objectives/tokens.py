"""What an objective is given, and what it returns.

Notation of this package: mu the behaviour policy that sampled the tokens, pi the policy being trained, r = pi / mu of one token,
A the advantage, sg(x) x held constant. Shape suffix P: positions of one packed micro-batch.
"""

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""exp(20) lies far outside any veto, and its square is still finite in fp32."""


@dataclass(frozen=True, slots=True)
class OtherSamples:
    """What each position has to know of the other samples of its trajectory, which may lie in other micro-batches."""

    vetoed_P: Tensor  # bool: one of them has an impossible ratio
    log_ratio_sums_P: Tensor  # float32, nats: log r summed over their trained tokens
    num_tokens_P: Tensor  # float32: how many those are


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
    # Under the weights at the start of the step. None: they are the present weights.
    proximal_logprobs_P: Tensor | None = None
    reference_logprobs_P: Tensor | None = None  # under the weights that the run started with
    # int64: how many versions the weights that sampled the token are behind. None: none are.
    lags_P: Tensor | None = None
    other_samples: OtherSamples | None = None  # None: each sample is its trajectory's only one

    @property
    def log_ratios_P(self) -> Tensor:
        """log r, bounded; 0 where a token is not trained."""
        return self.bounded(self.policy_logprobs_P - self.behaviour_logprobs_P)

    def bounded(self, log_ratios_P: Tensor) -> Tensor:
        """So that exp is finite; 0 where a token is not trained."""
        return torch.where(self.trained_P, log_ratios_P, 0.0).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


@dataclass(frozen=True, slots=True)
class PerToken:
    """What an objective computes for each position. Untrained positions are dropped afterwards, and the rest is summed."""

    loss_P: Tensor
    # The factor on each token's policy gradient, without gradient, for the effective sample size. None: 1.
    weights_P: Tensor | None = None
    masked_P: Tensor | None = None  # bool: the policy gradient of the token is switched off. None: of none
    vetoed_P: Tensor | None = None  # bool: its whole trajectory is switched off. None: none is


@dataclass(frozen=True, slots=True)
class Bounds:
    """The numbers of an objective. One that the objective does not use is not a number, so that a use of it shows."""

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
        """The names of those that are numbers."""
        names = (field.name for field in dataclasses.fields(self))
        return tuple(name for name in names if not math.isnan(getattr(self, name)))
