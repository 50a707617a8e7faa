"""Objectives of the form -w A log(pi): the policy gradient of each token, with a weight that is held constant.

| objective     | weight w                        | switched off                                | source                           |
|---------------|---------------------------------|---------------------------------------------|----------------------------------|
| `reinforce`   | 1                               | nothing                                     | Williams 1992                    |
| `stream_grpo` | min(r, cap)                     | outside a trust region; impossible ratios   | ours; the region is DPPO's       |
| `cispo`       | min(r, cap)                     | nothing                                     | MiniMax-M1, arXiv 2506.13585     |
| `topr`        | A > 0: 1; A < 0: min(r, cap)    | nothing                                     | TOPR, arXiv 2503.14286           |
| `sft`         | no advantage: -log(pi)          | nothing                                     | imitation                        |
"""

import torch

from trainer.learner.objectives.tokens import Bounds, PerToken, Tokens
from trainer.learner.objectives.trajectories import vetoed


def reinforce(tokens: Tokens, bounds: Bounds) -> PerToken:
    """-A log(pi): right only on-policy. Kept to compare the others with."""
    del bounds
    return PerToken(-tokens.advantages_P * tokens.policy_logprobs_P)


def stream_grpo(tokens: Tokens, bounds: Bounds) -> PerToken:
    """-m w A log(pi) + anchor (log r)^2, with w = min(r, cap) held constant; nothing for vetoed trajectories.

    m = 0 where the probability has already moved by more than delta the way A pushes it: the trust region of DPPO-Binary-TV, as
    prime-rl uses it.
    """
    log_ratios_P = tokens.log_ratios_P
    weights_P = log_ratios_P.detach().exp().clamp(max=bounds.ratio_cap)
    moved_P = tokens.policy_logprobs_P.detach().exp() - tokens.behaviour_logprobs_P.exp()
    masked_P = (tokens.advantages_P.sign() * moved_P) > bounds.delta
    vetoed_P = vetoed(tokens, bounds)
    gradient_P = torch.where(masked_P, 0.0, weights_P * tokens.advantages_P)
    loss_P = -gradient_P * tokens.policy_logprobs_P + bounds.anchor * log_ratios_P.square()
    return PerToken(torch.where(vetoed_P, 0.0, loss_P), weights_P, masked_P & ~vetoed_P, vetoed_P)


def cispo(tokens: Tokens, bounds: Bounds) -> PerToken:
    """-w A log(pi), with w = min(r, cap) held constant: every token keeps a gradient, however far it has moved.

    Like its authors in their experiments, we bound the weight from above only.
    """
    weights_P = tokens.log_ratios_P.detach().exp().clamp(max=bounds.ratio_cap)
    loss_P = -weights_P * tokens.advantages_P * tokens.policy_logprobs_P
    return PerToken(loss_P, weights_P)


def topr(tokens: Tokens, bounds: Bounds) -> PerToken:
    """-w A log(pi), with w = 1 where A > 0 and min(r, cap) elsewhere: what was good is imitated, however unlikely it has become,
    and what was bad is pushed away only as far as the policy still does it.

    The paper's ratio is of the whole trajectory. Over hundreds of tokens that is 0 or the cap, so we take each token's, as ROLL.
    """
    ratios_P = tokens.log_ratios_P.detach().exp()
    weights_P = torch.where(tokens.advantages_P > 0, 1.0, ratios_P.clamp(max=bounds.ratio_cap))
    return PerToken(-weights_P * tokens.advantages_P * tokens.policy_logprobs_P, weights_P)


def sft(tokens: Tokens, bounds: Bounds) -> PerToken:
    """-log(pi): imitates the trained tokens, whatever their advantage."""
    del bounds
    return PerToken(-tokens.policy_logprobs_P)
