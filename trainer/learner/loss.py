"""The objectives, as pure functions of tensors: no Megatron, no collectives, no state.

To add one, write a function here and register it in `OBJECTIVES`, and add its name and fields to `LossConfig` in config.py.

`policy_loss` returns a *sum* over trained tokens. The caller divides once, by the trained tokens of the whole update, so
neither the order of samples nor the size of a micro-batch changes the gradient.

Notation: mu the behaviour policy that sampled the tokens, pi the policy being trained, r = pi / mu per token, A the
advantage. Shape suffix P: positions of one packed micro-batch.

Sources: the trust region on probabilities follows DPPO-Binary-TV as used by prime-rl, the truncated weight CISPO
(MiniMax-M1, arXiv 2506.13585), the clipped surrogate PPO (arXiv 1707.06347) with the separate bounds of DAPO
(arXiv 2503.14476).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.batching.batch import Sample
from trainer.learner.config import LossConfig, LossKind

LOG_RATIO_BOUND = 20.0
"""exp(20) lies far outside any veto, and its square is still finite in fp32."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """What an objective sees. Only `policy_logprobs_P` carries a gradient; untrained tokens are ignored."""

    policy_logprobs_P: Tensor  # float32, nats
    behaviour_logprobs_P: Tensor  # float32, nats
    advantages_P: Tensor  # float32
    trained_P: Tensor  # bool
    segments_P: Tensor  # int64: which sample, from 0
    vetoed_elsewhere_P: Tensor  # bool: another sample of the same trajectory has an impossible ratio
    entropies_P: Tensor  # float32, nats; only reported
    reference_logprobs_P: Tensor | None = None  # float32, nats, under the weights the run started with


@dataclass(frozen=True, slots=True)
class PerToken:
    """What an objective computes for each position; untrained positions are dropped afterwards and the rest summed."""

    loss_P: Tensor
    weights_P: Tensor  # factor on each token's policy gradient, for the effective sample size
    masked_P: Tensor  # bool: the policy gradient of the token was switched off
    vetoed_P: Tensor  # bool: the whole trajectory was switched off


def stream_grpo(tokens: Tokens, log_ratios_P: Tensor, config: LossConfig) -> PerToken:
    """-m w A log(pi) + anchor (log r)^2, with w = min(r, cap) held constant; nothing for vetoed trajectories.

    m = 0 where the probability has already moved by more than delta the way A pushes it.
    """
    ratios_P = log_ratios_P.detach().exp()
    weights_P = ratios_P.clamp(max=config.ratio_cap)
    moved_P = tokens.policy_logprobs_P.detach().exp() - tokens.behaviour_logprobs_P.exp()
    masked_P = (tokens.advantages_P.sign() * moved_P) > config.delta
    vetoed_P = tokens.vetoed_elsewhere_P | _vetoed(ratios_P, tokens, config)
    gradient_P = torch.where(masked_P, 0.0, weights_P * tokens.advantages_P)
    loss_P = -gradient_P * tokens.policy_logprobs_P + config.anchor * log_ratios_P.square()
    return PerToken(torch.where(vetoed_P, 0.0, loss_P), weights_P, masked_P & ~vetoed_P, vetoed_P)


def ppo_clip(tokens: Tokens, log_ratios_P: Tensor, config: LossConfig) -> PerToken:
    """-min(r A, clip(r) A): PPO's surrogate with the behaviour policy as the old policy."""
    ratios_P = log_ratios_P.exp()
    clipped_P = ratios_P.clamp(1 - config.clip_low, 1 + config.clip_high)
    free_P, bounded_P = ratios_P * tokens.advantages_P, clipped_P * tokens.advantages_P
    return PerToken(
        -torch.minimum(free_P, bounded_P),
        ratios_P.detach(),
        bounded_P.detach() < free_P.detach(),
        _none(tokens),
    )


def grpo(tokens: Tokens, log_ratios_P: Tensor, config: LossConfig) -> PerToken:
    """-A log(pi): right only on-policy. Kept to compare the others with."""
    del log_ratios_P, config
    weights_P = torch.ones_like(tokens.advantages_P)
    return PerToken(-tokens.advantages_P * tokens.policy_logprobs_P, weights_P, _none(tokens), _none(tokens))


def sft(tokens: Tokens, log_ratios_P: Tensor, config: LossConfig) -> PerToken:
    """-log(pi): imitates the trained tokens, whatever their advantage."""
    del log_ratios_P, config
    weights_P = torch.ones_like(tokens.advantages_P)
    return PerToken(-tokens.policy_logprobs_P, weights_P, _none(tokens), _none(tokens))


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss that a recipe may name, and what it needs."""

    per_token: Callable[[Tokens, Tensor, LossConfig], PerToken]
    # The fields of LossConfig that it uses. `reference_kl` applies to every objective.
    reads: tuple[str, ...] = ()
    needs_veto: bool = False
    """Whether it uses `vetoed_elsewhere_P`: the learner then looks for impossible ratios in a trajectory's other samples."""


OBJECTIVES: dict[LossKind, Objective] = {
    "stream_grpo": Objective(
        stream_grpo, reads=("ratio_cap", "delta", "anchor", "veto_low", "veto_high"), needs_veto=True
    ),
    "ppo_clip": Objective(ppo_clip, reads=("clip_low", "clip_high")),
    "grpo": Objective(grpo),
    "sft": Objective(sft),
}


def ineffective_fields(config: LossConfig) -> list[str]:
    """Fields that were changed from their defaults and that the chosen objective does not read."""
    read = {*OBJECTIVES[config.kind].reads, "kind", "reference_kl"}
    default = LossConfig()
    names = (field.name for field in msgspec.structs.fields(LossConfig))
    return [name for name in names if name not in read and getattr(config, name) != getattr(default, name)]


def policy_loss(tokens: Tokens, config: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The configured objective summed over trained tokens, and what is reported of it.

    All values of the dictionary are sums over tokens, except `ratio_max`, which is a maximum.
    """
    log_ratios_P = tokens.policy_logprobs_P - tokens.behaviour_logprobs_P
    log_ratios_P = torch.where(tokens.trained_P, log_ratios_P, 0.0).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    per_token = OBJECTIVES[config.kind].per_token(tokens, log_ratios_P, config)
    drift_P = torch.zeros_like(log_ratios_P)
    loss_P = per_token.loss_P
    if tokens.reference_logprobs_P is not None:
        drift_P = (tokens.policy_logprobs_P - tokens.reference_logprobs_P).clamp(
            -LOG_RATIO_BOUND, LOG_RATIO_BOUND
        )
        # Half the square: its gradient, drift times the score, is that of KL(policy || reference) on-policy.
        loss_P = loss_P + torch.where(per_token.vetoed_P, 0.0, config.reference_kl * 0.5 * drift_P.square())
    loss = torch.where(tokens.trained_P, loss_P, 0.0).sum()
    return loss, _sums(tokens, per_token, loss, log_ratios_P.detach(), drift_P.detach())


def _sums(
    tokens: Tokens, per_token: PerToken, loss: Tensor, log_ratios_P: Tensor, drift_P: Tensor
) -> dict[str, Tensor]:
    ratios_P = log_ratios_P.exp()
    values = {
        "entropy": tokens.entropies_P,
        "ratio": ratios_P,
        "weight": per_token.weights_P,
        "weight_squared": per_token.weights_P.square(),
        "masked": per_token.masked_P,
        "vetoed": per_token.vetoed_P,
        "behaviour_kl": ratios_P - 1 - log_ratios_P,
        "reference_kl": 0.5 * drift_P.square(),
    }
    sums = {name: torch.where(tokens.trained_P, values_P, 0.0).sum() for name, values_P in values.items()}
    sums["ratio_max"] = torch.where(tokens.trained_P, ratios_P, 0.0).max()
    # A clone, because Megatron's schedule divides the loss that it is given in place.
    return {"loss": loss.detach().clone(), "tokens": tokens.trained_P.sum(), **sums}


def _vetoed(ratios_P: Tensor, tokens: Tokens, config: LossConfig) -> Tensor:
    """True for every position of a sample in which one trained ratio is outside the bounds."""
    outside_P = tokens.trained_P & _is_impossible(ratios_P, config)
    num_segments = int(tokens.segments_P[-1]) + 1
    num_outside_S = torch.zeros(num_segments, dtype=torch.int64, device=outside_P.device)
    num_outside_S.index_add_(0, tokens.segments_P, outside_P.long())
    return num_outside_S[tokens.segments_P] > 0


def find_vetoed_elsewhere(
    samples: Sequence[Sample], logprobs: Sequence[npt.NDArray[np.float32]], config: LossConfig
) -> list[bool]:
    """Which samples belong to a trajectory that has an impossible ratio in another of its samples.

    `logprobs` are under the weights of the update. A trajectory whose context was cut has several samples, which may lie in
    different micro-batches, so this must be known before any of them is trained.
    """
    offenders: dict[str, list[int]] = {}
    for index, (sample, values_T) in enumerate(zip(samples, logprobs, strict=True)):
        log_ratios_T = (values_T - sample.behaviour_logprobs_T)[sample.trained_T]
        ratios_T = torch.from_numpy(log_ratios_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        if _is_impossible(ratios_T, config).any():
            offenders.setdefault(sample.request_id, []).append(index)
    return [bool(set(offenders.get(one.request_id, ())) - {index}) for index, one in enumerate(samples)]


def _is_impossible(ratios: Tensor, config: LossConfig) -> Tensor:
    return (ratios < config.veto_low) | (ratios > config.veto_high)


def _none(tokens: Tokens) -> Tensor:
    return torch.zeros_like(tokens.trained_P)
