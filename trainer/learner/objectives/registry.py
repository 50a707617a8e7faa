"""Every objective that a recipe may name: policy gradients with a weight that is held constant, and PPO's clipped surrogate.

To add one, write a function, here or in a file beside this one, and register it at the end; its name goes into `LossKind` and a
number that no other objective has into `LossConfig`, both in trainer/learner/config.py.

The objectives of the first group have the form -w A log(pi):

| objective     | weight w                        | switched off                                | source                           |
|---------------|---------------------------------|---------------------------------------------|----------------------------------|
| `reinforce`   | 1                               | nothing                                     | Williams 1992                    |
| `stream_grpo` | min(r, cap)                     | outside a trust region; impossible ratios   | ours; the region is DPPO's       |
| `cispo`       | min(r, cap)                     | nothing                                     | MiniMax-M1, arXiv 2506.13585     |
| `topr`        | A > 0: 1; A < 0: min(r, cap)    | nothing                                     | TOPR, arXiv 2503.14286           |
| `sft`         | no advantage: -log(pi)          | nothing                                     | imitation                        |

The others have the form -min(x A, clip(x) A) for a ratio x that carries the gradient:

| objective       | x                           | weight, held constant              | source                                        |
|-----------------|-----------------------------|------------------------------------|-----------------------------------------------|
| `grpo`          | r                           | 1                                  | arXiv 2402.03300; bounds of DAPO, 2503.14476  |
| `dr_grpo`       | r                           | 1                                  | arXiv 2503.20783                              |
| `gspo`          | geometric mean of r         | 1                                  | arXiv 2507.18071                              |
| `decoupled_ppo` | pi / p                      | p / mu; 0 above the cap            | AReaL, arXiv 2505.24298                       |
| `tis`           | pi / p                      | min(p / mu, cap)                   | Yao et al. 2025, as in verl and slime         |
| `icepop`        | pi / p                      | p / mu; 0 outside floor and cap    | Ring-1T, arXiv 2510.18855                     |

p is the proximal policy: the weights at the start of the step. A step of one update trains exactly those weights, so x is 1, only the
weight is a correction, and no second forward pass is needed.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from trainer.learner.config import Aggregation, LossConfig, LossKind
from trainer.learner.objectives.own import load_own
from trainer.learner.objectives.tokens import Bounds, PerToken, Tokens, mean_log_ratios, vetoed


def reinforce(tokens: Tokens, bounds: Bounds) -> PerToken:
    """-A log(pi), which is correct only on-policy. It serves as a baseline for the others."""
    del bounds
    return PerToken(-tokens.advantages_P * tokens.policy_logprobs_P)


def stream_grpo(tokens: Tokens, bounds: Bounds) -> PerToken:
    """-m w A log(pi) + anchor (log r)^2, with w = min(r, cap) held constant; nothing for vetoed trajectories.

    m = 0 where the probability has already moved by more than delta in the direction of A: the trust region of DPPO-Binary-TV, as in
    prime-rl.
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
    """-w A log(pi), with w = 1 where A > 0 and min(r, cap) elsewhere: good actions are imitated, however unlikely they have become, and bad
    ones are pushed away only as far as the policy still takes them.

    The paper's ratio is of the whole trajectory. Over hundreds of tokens that is 0 or the cap, so each token's own ratio is used, as in
    ROLL.
    """
    ratios_P = tokens.log_ratios_P.detach().exp()
    weights_P = torch.where(tokens.advantages_P > 0, 1.0, ratios_P.clamp(max=bounds.ratio_cap))
    return PerToken(-weights_P * tokens.advantages_P * tokens.policy_logprobs_P, weights_P)


def sft(tokens: Tokens, bounds: Bounds) -> PerToken:
    """-log(pi): imitates the trained tokens, whatever their advantage."""
    del bounds
    return PerToken(-tokens.policy_logprobs_P)


def grpo(tokens: Tokens, bounds: Bounds) -> PerToken:
    """PPO's surrogate with the behaviour policy as the old policy."""
    ratios_P = tokens.log_ratios_P.exp()
    loss_P, masked_P = clipped(ratios_P, tokens.advantages_P, bounds)
    return PerToken(loss_P, ratios_P.detach(), masked_P)


def gspo(tokens: Tokens, bounds: Bounds) -> PerToken:
    """PPO's surrogate with one ratio for the whole trajectory: the geometric mean of its tokens' ratios.

    This is the form that the paper calls GSPO-token: the value is the trajectory's ratio, the gradient that of each token. Summed over a
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
    """The objective `decoupled_ppo`, but weights above the cap are truncated to it."""
    return _weighted(tokens, _proximal_weights(tokens).clamp(max=bounds.ratio_cap), bounds)


def icepop(tokens: Tokens, bounds: Bounds) -> PerToken:
    """The objective `decoupled_ppo`, but tokens with weights below the floor are masked too."""
    weights_P = _proximal_weights(tokens)
    outside_P = (weights_P < bounds.ratio_floor) | (weights_P > bounds.ratio_cap)
    return _weighted(tokens, torch.where(outside_P, 0.0, weights_P), bounds)


def clipped(ratios_P: Tensor, advantages_P: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """-min(x A, clip(x) A), and the positions where the clip removed the gradient.
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


PerTokenLoss = Callable[[Tokens, Bounds], PerToken]


@dataclass(frozen=True, slots=True)
class Objective:
    """A function, the numbers that it uses if the recipe gives none, and its requirements."""

    per_token: PerTokenLoss
    bounds: Bounds = field(default_factory=Bounds)
    aggregation: Aggregation = "token"
    uses_proximal: bool = False
    """Whether the function reads `proximal_logprobs_P`."""
    uses_trajectory: bool = False
    """Whether the function reads `other_samples`: the learner then computes the ratios of a trajectory's other samples before it trains
    one of them.
    """


OBJECTIVES: dict[LossKind, Objective] = {
    "stream_grpo": Objective(
        stream_grpo,
        Bounds(ratio_cap=5.0, delta=0.2, anchor=1e-3, veto_low=1e-4, veto_high=100.0),
        uses_trajectory=True,
    ),
    "cispo": Objective(cispo, Bounds(ratio_cap=5.0)),
    "grpo": Objective(grpo, Bounds(clip_low=0.2, clip_high=0.28, dual_clip=3.0)),
    "dr_grpo": Objective(grpo, Bounds(clip_low=0.2, clip_high=0.2, dual_clip=0.0), aggregation="constant"),
    "gspo": Objective(
        gspo,
        Bounds(clip_low=3e-4, clip_high=4e-4, dual_clip=0.0),
        aggregation="trajectory",
        uses_trajectory=True,
    ),
    "decoupled_ppo": Objective(
        decoupled_ppo,
        Bounds(ratio_cap=5.0, clip_low=0.2, clip_high=0.2, dual_clip=0.0),
        uses_proximal=True,
    ),
    "tis": Objective(
        tis, Bounds(ratio_cap=2.0, clip_low=0.2, clip_high=0.28, dual_clip=0.0), uses_proximal=True
    ),
    "icepop": Objective(
        icepop,
        Bounds(ratio_floor=0.5, ratio_cap=5.0, clip_low=0.2, clip_high=0.28, dual_clip=0.0),
        uses_proximal=True,
    ),
    "topr": Objective(topr, Bounds(ratio_cap=1.0)),
    "reinforce": Objective(reinforce),
    "sft": Objective(sft),
}


@dataclass(frozen=True, slots=True)
class Loss:
    """The resolved settings of a recipe's `[learner.loss]`."""

    config: LossConfig
    per_token: PerTokenLoss
    bounds: Bounds
    aggregation: Aggregation
    uses_proximal: bool
    uses_trajectory: bool

    @property
    def recomputes_proximal(self) -> bool:
        """Whether it needs log-probs under the weights at the start of the step when these are no longer the present weights."""
        return self.uses_proximal and self.config.proximal == "recompute"

    @property
    def needs_other_samples(self) -> bool:
        return self.uses_trajectory or self.config.geometric_mask is not None


def resolve(config: LossConfig) -> Loss:
    """The objective with the recipe's numbers instead of its own. Raises ValueError for a function that cannot be loaded."""
    objective = _own(config.objective) if config.objective else OBJECTIVES[config.kind]
    given = {name: getattr(config, name) for name in _names(objective, config)}
    return Loss(
        config,
        objective.per_token,
        dataclasses.replace(
            objective.bounds, **{name: value for name, value in given.items() if value is not None}
        ),
        config.aggregation or objective.aggregation,
        uses_proximal=objective.uses_proximal,
        uses_trajectory=objective.uses_trajectory,
    )


def ineffective_fields(loss: Loss) -> list[str]:
    """Fields of the recipe that differ from their defaults although nothing reads them."""
    config, default = loss.config, LossConfig()
    read = {"kind", "objective", "aggregation", "reference_kl", "entropy", "geometric_mask"}
    read.update(_names(OBJECTIVES[config.kind], config))
    conditions = {
        "proximal": loss.uses_proximal,
        "constant_tokens": loss.aggregation == "constant",
        "reference_kl_kind": config.reference_kl > 0,
    }
    read.update(name for name, is_read in conditions.items() if is_read)
    names = (one.name for one in msgspec.structs.fields(LossConfig))
    return [name for name in names if name not in read and getattr(config, name) != getattr(default, name)]


def _own(specification: str) -> Objective:
    """A user's own function, which may read everything."""
    return Objective(load_own(specification), uses_proximal=True, uses_trajectory=True)


def _names(objective: Objective, config: LossConfig) -> tuple[str, ...]:
    """The numbers that the recipe may set: those that the objective uses; a user's own function may use any."""
    every = tuple(one.name for one in dataclasses.fields(Bounds))
    return every if config.objective else objective.bounds.used
