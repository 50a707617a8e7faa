"""Objectives with PPO's clipped surrogate, -min(x A, clip(x) A) for a ratio x that carries the gradient.

| objective       | x                           | weight, held constant              | source                                        |
|-----------------|-----------------------------|------------------------------------|-----------------------------------------------|
| `grpo`          | r                           | 1                                  | arXiv 2402.03300; bounds of DAPO, 2503.14476  |
| `dr_grpo`       | r                           | 1                                  | arXiv 2503.20783                              |
| `gspo`          | geometric mean of r         | 1                                  | arXiv 2507.18071                              |
| `decoupled_ppo` | pi / p                      | p / mu; 0 above the cap            | AReaL, arXiv 2505.24298                       |
| `tis`           | pi / p                      | min(p / mu, cap)                   | Yao et al. 2025, as in verl and slime         |
| `icepop`        | pi / p                      | p / mu; 0 outside floor and cap    | Ring-1T, arXiv 2510.18855                     |

p is the proximal policy: the weights at the start of the step. A step of one update trains exactly those weights, so x is 1, only
the weight corrects, and nothing is computed twice.
"""

import torch
from torch import Tensor

from trainer.learner.objectives.tokens import Bounds, PerToken, Tokens
from trainer.learner.objectives.trajectories import mean_log_ratios


def grpo(tokens: Tokens, bounds: Bounds) -> PerToken:
    """PPO's surrogate with the behaviour policy as the old policy."""
    ratios_P = tokens.log_ratios_P.exp()
    loss_P, masked_P = clipped(ratios_P, tokens.advantages_P, bounds)
    return PerToken(loss_P, ratios_P.detach(), masked_P)


def gspo(tokens: Tokens, bounds: Bounds) -> PerToken:
    """PPO's surrogate with one ratio for the whole trajectory: the geometric mean of its tokens' ratios.

    In the form that the paper calls GSPO-token: the value is the trajectory's ratio, the gradient that of each token. Summed over a
    trajectory and divided by its tokens (aggregation = "trajectory"), this is the gradient of GSPO.
    """
    policy_P = tokens.policy_logprobs_P
    ratios_P = (mean_log_ratios(tokens) + policy_P - policy_P.detach()).exp()
    loss_P, masked_P = clipped(ratios_P, tokens.advantages_P, bounds)
    return PerToken(loss_P, ratios_P.detach(), masked_P)


def decoupled_ppo(tokens: Tokens, bounds: Bounds) -> PerToken:
    """The surrogate around the proximal policy, weighted with proximal over behaviour; nothing for weights above the cap."""
    weights_P = _proximal_weights(tokens)
    return _weighted(tokens, torch.where(weights_P > bounds.ratio_cap, 0.0, weights_P), bounds)


def tis(tokens: Tokens, bounds: Bounds) -> PerToken:
    """As `decoupled_ppo`, but weights above the cap are truncated to it."""
    return _weighted(tokens, _proximal_weights(tokens).clamp(max=bounds.ratio_cap), bounds)


def icepop(tokens: Tokens, bounds: Bounds) -> PerToken:
    """As `decoupled_ppo`, but nothing for weights below the floor either."""
    weights_P = _proximal_weights(tokens)
    outside_P = (weights_P < bounds.ratio_floor) | (weights_P > bounds.ratio_cap)
    return _weighted(tokens, torch.where(outside_P, 0.0, weights_P), bounds)


def clipped(ratios_P: Tensor, advantages_P: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """-min(x A, clip(x) A), and where that switched the gradient off.

    With a dual clip (arXiv 1912.09729), a token with A < 0 counts at most dual_clip |A|, however likely it has become.
    """
    free_P = ratios_P * advantages_P
    bounded_P = ratios_P.clamp(1 - bounds.clip_low, 1 + bounds.clip_high) * advantages_P
    surrogate_P = torch.minimum(free_P, bounded_P)
    masked_P = bounded_P.detach() < free_P.detach()
    if bounds.dual_clip > 0:
        least_P = bounds.dual_clip * advantages_P
        beyond_P = (advantages_P < 0) & (surrogate_P.detach() < least_P)
        surrogate_P, masked_P = torch.where(beyond_P, least_P, surrogate_P), masked_P | beyond_P
    return -surrogate_P, masked_P


def _weighted(tokens: Tokens, weights_P: Tensor, bounds: Bounds) -> PerToken:
    ratios_P = tokens.bounded(tokens.policy_logprobs_P - _proximal(tokens)).exp()
    loss_P, masked_P = clipped(ratios_P, tokens.advantages_P, bounds)
    return PerToken(weights_P * loss_P, weights_P * ratios_P.detach(), masked_P | (weights_P == 0))


def _proximal_weights(tokens: Tokens) -> Tensor:
    return tokens.bounded(_proximal(tokens) - tokens.behaviour_logprobs_P).exp()


def _proximal(tokens: Tokens) -> Tensor:
    found_P = tokens.proximal_logprobs_P
    return tokens.policy_logprobs_P.detach() if found_P is None else found_P
