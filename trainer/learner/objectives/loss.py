"""The loss of a micro-batch: the objective, what a recipe adds to it, and what is reported.

`policy_loss` returns a *sum* over trained tokens. The caller divides once per update (aggregation.py), so neither the order of
samples nor the size of a micro-batch changes the gradient.
"""

from dataclasses import replace

import torch
from torch import Tensor

from pipeline.rollout_store.trained import REASONS
from trainer.learner.config import LossConfig
from trainer.learner.lag_sums import sums_by_lag
from trainer.learner.objectives.registry import Loss
from trainer.learner.objectives.tokens import PerToken, Tokens
from trainer.learner.objectives.trajectories import mean_log_ratios

TOKEN_ROWS = ("logprobs", "weights", "reasons")
"""What is reported of each token: the policy's log-prob, the objective's weight, and why there is no policy gradient, as the place in
REASONS. 0 where a token is not trained.
"""

K3_BOUND = 10.0
"""Nats. k3 grows as the reference's probability over the policy's; as in verl, a larger value has no gradient."""


def policy_loss(
    tokens: Tokens, loss: Loss, factors_P: Tensor | None = None, *, keep_tokens: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss summed over trained tokens, each multiplied by its factor, and what is reported of it.

    All values of the dictionary are sums over tokens, except `ratio_max`, which is a maximum, `by_lag`, which is a table of
    sums (see lag_sums.py), and `by_token`, which is there with `keep_tokens` only: TOKEN_ROWS at each position.
    """
    config = loss.config
    tokens = _completed(tokens, loss)
    per_token = loss.per_token(tokens, loss.bounds)
    loss_P, off_P = per_token.loss_P, per_token.vetoed_P
    if config.geometric_mask is not None:
        outside_P = _outside(tokens, config.geometric_mask)
        loss_P, off_P = torch.where(outside_P, 0.0, loss_P), _either(off_P, outside_P)
    drift_P = _drift(tokens)
    if config.reference_kl and config.reference_kl_kind != "k1":
        loss_P = loss_P + _unless(off_P, _divergence(drift_P, config, weight=config.reference_kl))
    if config.entropy:
        loss_P = loss_P - _unless(off_P, config.entropy * tokens.entropies_P)
    if factors_P is not None:
        loss_P = loss_P * factors_P
    total = torch.where(tokens.trained_P, loss_P, 0.0).sum()
    divergence_P = _divergence(drift_P, config).detach()
    sums = _sums(tokens, replace(per_token, vetoed_P=off_P), total, divergence_P)
    if keep_tokens:
        sums["by_token"] = _by_token(tokens, per_token, off_P)
    return total, sums


def log_linear_proximal(tokens: Tokens) -> Tensor:
    """The proximal log-probs between those of the behaviour policy and the policy's, by lag, without a forward pass.

    The weights that sampled a token, those at the start of the step, `lag` versions later, and the present ones, one version
    further, are taken to lie on a line: A-3PO, arXiv 2512.06547.
    """
    behaviour_P = tokens.behaviour_logprobs_P
    if tokens.lags_P is None:
        return behaviour_P
    share_P = tokens.lags_P / (tokens.lags_P + 1)
    return behaviour_P + share_P * (tokens.policy_logprobs_P.detach() - behaviour_P)


def _completed(tokens: Tokens, loss: Loss) -> Tokens:
    """The tokens with what the recipe says about advantages and the proximal policy."""
    config = loss.config
    if config.reference_kl and config.reference_kl_kind == "k1":
        cost_P = config.reference_kl * _drift(tokens).detach()
        tokens = replace(tokens, advantages_P=tokens.advantages_P - cost_P)
    if loss.uses_proximal and config.proximal == "log_linear":
        tokens = replace(tokens, proximal_logprobs_P=log_linear_proximal(tokens))
    return tokens


def _drift(tokens: Tokens) -> Tensor:
    """log(pi / reference), bounded; 0 where there is no reference."""
    if tokens.reference_logprobs_P is None:
        return torch.zeros_like(tokens.behaviour_logprobs_P)
    return tokens.bounded(tokens.policy_logprobs_P - tokens.reference_logprobs_P)


def _divergence(drift_P: Tensor, config: LossConfig, *, weight: float = 1.0) -> Tensor:
    """Schulman's estimates of KL(pi || reference), each a function of the drift d, times a weight.

    k1, d, is unbiased, but its own gradient is 0 in the mean: so it becomes a cost in the advantage, where the objective weights and
    masks it as any other. k2, d^2 / 2, has the gradient of that cost on-policy. k3, exp(-d) - 1 + d, is never negative and unbiased,
    and its gradient is that of KL(reference || pi).
    """
    match config.reference_kl_kind:
        case "k1":
            return weight * drift_P
        case "k2":
            return weight * 0.5 * drift_P.square()
        case "k3":
            return weight * (torch.expm1(-drift_P) + drift_P).clamp(max=K3_BOUND)


def _outside(tokens: Tokens, bounds: tuple[float, float]) -> Tensor:
    """Whether the geometric mean of the trajectory's ratios lies outside the bounds."""
    means_P = mean_log_ratios(tokens).exp()
    return (means_P < bounds[0]) | (means_P > bounds[1])


def _either(one_P: Tensor | None, other_P: Tensor) -> Tensor:
    return other_P if one_P is None else one_P | other_P


def _unless(off_P: Tensor | None, values_P: Tensor) -> Tensor:
    return values_P if off_P is None else torch.where(off_P, 0.0, values_P)


def _sums(tokens: Tokens, per_token: PerToken, total: Tensor, divergence_P: Tensor) -> dict[str, Tensor]:
    log_ratios_P = tokens.log_ratios_P.detach()
    ratios_P, none_P = log_ratios_P.exp(), torch.zeros_like(tokens.trained_P)
    weights_P = torch.ones_like(ratios_P) if per_token.weights_P is None else per_token.weights_P
    vetoed_P = none_P if per_token.vetoed_P is None else per_token.vetoed_P
    values = {
        "entropy": tokens.entropies_P.detach(),
        "ratio": ratios_P,
        "weight": weights_P,
        "weight_squared": weights_P.square(),
        "masked": none_P if per_token.masked_P is None else per_token.masked_P & ~vetoed_P,
        "vetoed": vetoed_P,
        "behaviour_kl": ratios_P - 1 - log_ratios_P,
        "reference_kl": divergence_P,
    }
    sums = {name: torch.where(tokens.trained_P, values_P, 0.0).sum() for name, values_P in values.items()}
    sums["ratio_max"] = torch.where(tokens.trained_P, ratios_P, 0.0).max()
    lags_P = torch.zeros_like(tokens.segments_P) if tokens.lags_P is None else tokens.lags_P
    sums["by_lag"] = sums_by_lag(lags_P, tokens.trained_P, values)
    # A clone, because Megatron's schedule divides the loss that it is given in place.
    return {"loss": total.detach().clone(), "tokens": tokens.trained_P.sum(), **sums}


def _by_token(tokens: Tokens, per_token: PerToken, off_P: Tensor | None) -> Tensor:
    """`off_P` are the positions that the objective vetoed or the geometric mask switched off."""
    reasons_P = torch.zeros_like(tokens.policy_logprobs_P)
    switches = {"masked": per_token.masked_P, "geometric_mask": off_P, "vetoed": per_token.vetoed_P}
    for reason, switched_P in switches.items():
        if switched_P is not None:
            reasons_P = torch.where(switched_P, float(REASONS.index(reason)), reasons_P)
    weights_P = torch.ones_like(reasons_P) if per_token.weights_P is None else per_token.weights_P
    rows = torch.stack([tokens.policy_logprobs_P.detach(), weights_P.detach(), reasons_P])
    return torch.where(tokens.trained_P, rows, 0.0)
