"""The loss of a micro-batch: the objective, the recipe's additions, the aggregation over tokens, and the reported values.

`policy_loss` returns a *sum* over trained tokens. The caller divides once per update, so neither the order of samples nor the size
of a micro-batch changes the gradient. Each sample's tokens have a factor, and the whole update has one divisor:

| aggregation  | loss of an update with N trajectories, T_i trained tokens each         |
|--------------|------------------------------------------------------------------------|
| `token`      | sum over all tokens / sum of T_i: each token counts alike              |
| `trajectory` | (1 / N) sum over i of (sum over its tokens / T_i): each trajectory counts alike |
| `constant`   | sum over all tokens / (N * constant_tokens): as `token`, but a step of long trajectories weighs more |

A trajectory counts once, even if cuts of its context divide it into several samples. Factors and divisor follow from the samples of an
update alone, which all ranks know; so the gradient depends neither on micro-batches, nor on ranks, nor on the order in which groups arrive.

The effect of the objective on the trained tokens is also reported by lag: the number of versions from the weights that sampled a
token to those that the step starts from.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.rollout_store.record import REASONS
from trainer.batching.batch import Sample
from trainer.learner.config import NUM_LAGS, Aggregation, LagMetrics, LossConfig, SignalMetrics
from trainer.learner.objectives.registry import Loss
from trainer.learner.objectives.tokens import PerToken, Tokens, mean_log_ratios


def factors(samples: Sequence[Sample], aggregation: Aggregation) -> list[float] | None:
    """The factor on the loss of each sample's tokens; None: all are 1. All samples of a trajectory must be among `samples`."""
    if aggregation != "trajectory":
        return None
    num_tokens = _trained_tokens(samples)
    return [1 / max(num_tokens[sample.request_id], 1) for sample in samples]


def divisor(samples: Sequence[Sample], aggregation: Aggregation, *, constant_tokens: int) -> int:
    """The divisor of the sum over these samples. The divisors of the parts of an update add up to that of the whole update."""
    num_tokens = _trained_tokens(samples)
    if aggregation == "token":
        return num_tokens.total()
    num_trajectories = sum(count > 0 for count in num_tokens.values())
    return num_trajectories * (constant_tokens if aggregation == "constant" else 1)


def _trained_tokens(samples: Sequence[Sample]) -> Counter[str]:
    """The number of trained tokens by trajectory."""
    counted = Counter[str]()
    for sample in samples:
        counted[sample.request_id] += sample.num_trained_tokens
    return counted


LAG_SUMS = ("tokens", "weight", "weight_squared", "masked", "vetoed", "behaviour_kl", "signal")
"""The columns in order: the value that each sums over the tokens of a lag."""

SHAPE = (NUM_LAGS, 2, len(LAG_SUMS))
"""Each lag has two rows: the first counts every token as 1, the second as its signal."""


def signals(tokens: Tokens) -> Tensor:
    """The signal of each token, |A| (1 - pi), without unit and without gradient.

    A is the advantage that the objective gets: after credit, and less the cost of `reference_kl` where its kind is k1. pi is the
    probability of the token under the weights of this update, at the temperature of training. 1 - pi is how much log(pi) changes with the
    token's logit, so a token's signal is the size of its on-policy gradient there. It is 0 for a certain token, however large its
    advantage.
    """
    # A rounding error may put log(pi) above 0.
    doubt_P = -torch.expm1(tokens.policy_logprobs_P.detach().clamp(max=0.0))
    return torch.where(tokens.trained_P, tokens.advantages_P.abs() * doubt_P, 0.0)


def sums_by_lag(lags_P: Tensor, trained_P: Tensor, values: Mapping[str, Tensor]) -> Tensor:
    """Sums of `values` over the trained tokens, float64, in the shape SHAPE. `values` holds every column but `tokens`.

    It is computed as a product with indicators, because sums by index depend on the order of threads on a GPU.
    """
    of_lag_LR = (torch.arange(NUM_LAGS, device=lags_P.device)[:, None] == lags_P[trained_P]).double()
    columns_P = [torch.ones_like(values["weight"]), *(values[name] for name in LAG_SUMS[1:])]
    columns_RC = torch.stack([column_P[trained_P].double() for column_P in columns_P], dim=1)
    signals_R1 = values["signal"][trained_P].double()[:, None]
    return torch.stack([of_lag_LR @ columns_RC, of_lag_LR @ (signals_R1 * columns_RC)], dim=1)


def lags_of(versions_P: npt.NDArray[np.int32], lags: Mapping[int, int]) -> npt.NDArray[np.int64]:
    """The lag of each position by the version that sampled its target; 0 for a version that `lags` does not name."""
    lags_P = np.zeros(len(versions_P), np.int64)
    for version, lag in lags.items():
        lags_P[versions_P == version] = min(lag, NUM_LAGS - 1)
    return lags_P


def lag_metrics(sums: npt.NDArray[np.float64]) -> tuple[LagMetrics, ...]:
    """The metrics of each lag at which a token was trained; `sums` has the shape SHAPE."""
    return tuple(
        LagMetrics(lag=lag, num_tokens=round(plain[0]), **_shares(plain), signal=_signal_metrics(of_signal))
        for lag, (plain, of_signal) in enumerate(sums.tolist())
        if plain[0]
    )


def signal_metrics(sums: npt.NDArray[np.float64]) -> SignalMetrics | None:
    """The metrics by signal of all tokens, whatever their lag; `sums` has the shape SHAPE."""
    return _signal_metrics(sums[:, 1].sum(axis=0).tolist())


def _signal_metrics(sums: Sequence[float]) -> SignalMetrics | None:
    total, squared = sums[0], sums[LAG_SUMS.index("signal")]
    if not total:
        return None
    return SignalMetrics(total=total, num_tokens=total**2 / squared, **_shares(sums))


def _shares(sums: Sequence[float]) -> dict[str, float]:
    """The shares from the sums of one row, in the order of LAG_SUMS: tokens count as in that row, as 1 or as their signal s.

    With objective weights w, the effective sample size is (sum s w)^2 / (sum s * sum s w^2): 1 where all weights are the same.
    """
    tokens, weight, weight_squared, masked, vetoed, behaviour_kl, _ = sums
    return {
        # All weights are 0: every token is outside the bounds.
        "ess_share": weight**2 / (tokens * weight_squared) if weight_squared else 0.0,
        "masked_share": masked / tokens,
        "vetoed_share": vetoed / tokens,
        "behaviour_kl": behaviour_kl / tokens,
    }


TOKEN_ROWS = ("logprobs", "weights", "reasons")
"""The rows of the report about each token: the policy's log-prob, the objective's weight, and the index in REASONS of why there is no
policy gradient. They are 0 where a token is not trained.
"""

K3_BOUND = 10.0
"""Nats. k3 grows with the ratio of the reference's probability to the policy's; as in verl, a larger value has no gradient."""


def policy_loss(
    tokens: Tokens, loss: Loss, factors_P: Tensor | None = None, *, keep_tokens: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss summed over trained tokens, each multiplied by its factor, and the reported values.

    All values of the dictionary are sums over tokens, except `ratio_max`, which is a maximum, `by_lag`, which is a table of
    sums by lag, and `by_token`, which exists only with `keep_tokens`: TOKEN_ROWS at each position.
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
    further, are assumed to be on a line: A-3PO, arXiv 2512.06547.
    """
    behaviour_P = tokens.behaviour_logprobs_P
    if tokens.lags_P is None:
        return behaviour_P
    share_P = tokens.lags_P / (tokens.lags_P + 1)
    return behaviour_P + share_P * (tokens.policy_logprobs_P.detach() - behaviour_P)


def _completed(tokens: Tokens, loss: Loss) -> Tokens:
    """The tokens, with advantages and proximal log-probs as the recipe's settings change them."""
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

    k1, d, is unbiased, but the mean of its own gradient is 0. So it becomes a cost in the advantage, which the objective weights and masks
    like any other. k2, d^2 / 2, has the gradient of that cost on-policy. k3, exp(-d) - 1 + d, is never negative and unbiased, and its
    gradient is that of KL(reference || pi).
    """
    match config.reference_kl_kind:
        case "k1":
            return weight * drift_P
        case "k2":
            return weight * 0.5 * drift_P.square()
        case "k3":
            return weight * (torch.expm1(-drift_P) + drift_P).clamp(max=K3_BOUND)


def _outside(tokens: Tokens, bounds: tuple[float, float]) -> Tensor:
    """Whether the geometric mean of the trajectory's ratios is outside the bounds."""
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
        "signal": signals(tokens),
    }
    sums = {name: torch.where(tokens.trained_P, values_P, 0.0).sum() for name, values_P in values.items()}
    sums["ratio_max"] = torch.where(tokens.trained_P, ratios_P, 0.0).max()
    lags_P = torch.zeros_like(tokens.segments_P) if tokens.lags_P is None else tokens.lags_P
    sums["by_lag"] = sums_by_lag(lags_P, tokens.trained_P, values)
    # A clone, because Megatron's schedule divides the loss that it is given in place.
    return {"loss": total.detach().clone(), "tokens": tokens.trained_P.sum(), **sums}


def _by_token(tokens: Tokens, per_token: PerToken, off_P: Tensor | None) -> Tensor:
    """Three rows, one value per position: the policy's log-prob, the importance weight, and the index in REASONS of what switched the token
    off. Positions that are not trained have 0. `off_P` marks the positions that the objective vetoed or the geometric mask switched off.
    """
    reasons_P = torch.zeros_like(tokens.policy_logprobs_P)
    switches = {"masked": per_token.masked_P, "geometric_mask": off_P, "vetoed": per_token.vetoed_P}
    for reason, switched_P in switches.items():
        if switched_P is not None:
            reasons_P = torch.where(switched_P, float(REASONS.index(reason)), reasons_P)
    weights_P = torch.ones_like(reasons_P) if per_token.weights_P is None else per_token.weights_P
    rows = torch.stack([tokens.policy_logprobs_P.detach(), weights_P.detach(), reasons_P])
    return torch.where(tokens.trained_P, rows, 0.0)
