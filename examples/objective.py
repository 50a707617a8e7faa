"""An objective of one's own: cispo whose weight also falls with the lag. In a recipe:

[learner.loss]
objective = "objective.py:by_lag"
ratio_cap = 5.0
"""

from trainer.learner.objectives.tokens import Bounds, PerToken, Tokens


def by_lag(tokens: Tokens, bounds: Bounds) -> PerToken:
    """-w A log(pi), with w = min(r, cap) / (1 + lag) held constant."""
    weights_P = tokens.log_ratios_P.detach().exp().clamp(max=bounds.ratio_cap)
    if tokens.lags_P is not None:
        weights_P = weights_P / (1 + tokens.lags_P)
    return PerToken(-weights_P * tokens.advantages_P * tokens.policy_logprobs_P, weights_P)
