"""Every objective that a recipe may name, in one place.

To add one, write a function in weighted.py, surrogates.py or a file beside them, and add it here; its name goes into `LossKind`
and a number that no other objective has into `LossConfig`, both in trainer/learner/config.py.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from trainer.learner.config import Aggregation, LossConfig, LossKind
from trainer.learner.objectives.own import load_own
from trainer.learner.objectives.surrogates import decoupled_ppo, grpo, gspo, icepop, tis
from trainer.learner.objectives.tokens import Bounds, PerToken, Tokens
from trainer.learner.objectives.weighted import cispo, reinforce, sft, stream_grpo, topr

PerTokenLoss = Callable[[Tokens, Bounds], PerToken]


@dataclass(frozen=True, slots=True)
class Objective:
    """A function, the numbers that it uses where the recipe gives none, and what it needs."""

    per_token: PerTokenLoss
    bounds: Bounds = field(default_factory=Bounds)
    aggregation: Aggregation = "token"
    uses_proximal: bool = False
    """Whether it reads `proximal_logprobs_P`."""
    uses_trajectory: bool = False
    """Whether it reads `other_samples`: the learner then looks at a trajectory's other samples before it trains one of them."""


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
    """What `[learner.loss]` of a recipe comes to."""

    config: LossConfig
    per_token: PerTokenLoss
    bounds: Bounds
    aggregation: Aggregation
    uses_proximal: bool
    uses_trajectory: bool

    @property
    def recomputes_proximal(self) -> bool:
        """Whether it needs log-probs under the weights at the start of the step, where they are not the present weights."""
        return self.uses_proximal and self.config.proximal == "recompute"

    @property
    def needs_other_samples(self) -> bool:
        return self.uses_trajectory or self.config.geometric_mask is not None


def resolve(config: LossConfig) -> Loss:
    """The objective with the recipe's numbers in place of its own. Raises ValueError for a function that cannot be loaded."""
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
    """A function of the user's own may read everything."""
    return Objective(load_own(specification), uses_proximal=True, uses_trajectory=True)


def _names(objective: Objective, config: LossConfig) -> tuple[str, ...]:
    """The numbers that the recipe may give: those that the objective uses; a function of the user's own may use any."""
    every = tuple(one.name for one in dataclasses.fields(Bounds))
    return every if config.objective else objective.bounds.used
