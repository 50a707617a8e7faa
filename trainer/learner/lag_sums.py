"""What the objective did to the trained tokens, apart by their lag: how many versions the weights that sampled a token are
behind those that the step starts from.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.learner.config import NUM_LAGS, LagMetrics

LAG_SUMS = ("tokens", "weight", "weight_squared", "masked", "vetoed", "behaviour_kl")
"""The columns, in order: what each sums over the tokens of a lag."""

SHAPE = (NUM_LAGS, len(LAG_SUMS))


def sums_by_lag(lags_P: Tensor, trained_P: Tensor, values: Mapping[str, Tensor]) -> Tensor:
    """Sums of `values` over the trained tokens, one row per lag, float64. `values` holds every column but `tokens`.

    A product with indicators, because sums by index depend on the order of threads on a GPU.
    """
    of_lag_LR = torch.arange(NUM_LAGS, device=lags_P.device)[:, None] == lags_P[trained_P]
    columns_P = [torch.ones_like(values["weight"]), *(values[name] for name in LAG_SUMS[1:])]
    return of_lag_LR.double() @ torch.stack([column_P[trained_P].double() for column_P in columns_P], dim=1)


def lags_of(versions_P: npt.NDArray[np.int32], lags: Mapping[int, int]) -> npt.NDArray[np.int64]:
    """The lag of each position by the version that sampled its target; 0 for a version that `lags` does not name."""
    lags_P = np.zeros(len(versions_P), np.int64)
    for version, lag in lags.items():
        lags_P[versions_P == version] = min(lag, NUM_LAGS - 1)
    return lags_P


def lag_metrics(sums: npt.NDArray[np.float64]) -> tuple[LagMetrics, ...]:
    """The metrics of each lag that a token was trained at; `sums` has the shape SHAPE."""
    return tuple(
        LagMetrics(
            lag=lag,
            num_tokens=round(tokens),
            ess_share=weight**2 / (tokens * weight_squared) if weight_squared else 0.0,
            masked_share=masked / tokens,
            vetoed_share=vetoed / tokens,
            behaviour_kl=behaviour_kl / tokens,
        )
        for lag, (tokens, weight, weight_squared, masked, vetoed, behaviour_kl) in enumerate(sums.tolist())
        if tokens
    )
