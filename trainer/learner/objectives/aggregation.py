"""How the losses of tokens become one loss: a factor for each sample's tokens, and one divisor for the whole update.

| aggregation  | loss of an update with N trajectories, T_i trained tokens each         |
|--------------|------------------------------------------------------------------------|
| `token`      | sum over all tokens / sum of T_i: each token counts alike              |
| `trajectory` | (1 / N) sum over i of (sum over its tokens / T_i): each trajectory counts alike |
| `constant`   | sum over all tokens / (N * constant_tokens): as `token`, but a step of long trajectories weighs more |

Whatever its context was cut into, a trajectory counts once. Factors and divisor follow from the samples of an update alone, which
all ranks know; so the gradient depends neither on micro-batches, nor on ranks, nor on the order in which groups come in.
"""

from collections import Counter
from collections.abc import Sequence

from trainer.batching.batch import Sample
from trainer.learner.config import Aggregation


def factors(samples: Sequence[Sample], aggregation: Aggregation) -> list[float] | None:
    """What the loss of each sample's tokens is multiplied by; None: by 1. All samples of a trajectory are among `samples`."""
    if aggregation != "trajectory":
        return None
    num_tokens = _trained_tokens(samples)
    return [1 / max(num_tokens[sample.request_id], 1) for sample in samples]


def divisor(samples: Sequence[Sample], aggregation: Aggregation, *, constant_tokens: int) -> int:
    """What the sum over these samples is divided by. Of parts of an update, the sum of their divisors is that of the whole."""
    num_tokens = _trained_tokens(samples)
    if aggregation == "token":
        return num_tokens.total()
    num_trajectories = sum(count > 0 for count in num_tokens.values())
    return num_trajectories * (constant_tokens if aggregation == "constant" else 1)


def _trained_tokens(samples: Sequence[Sample]) -> Counter[str]:
    """By trajectory."""
    counted = Counter[str]()
    for sample in samples:
        counted[sample.request_id] += sample.num_trained_tokens
    return counted
