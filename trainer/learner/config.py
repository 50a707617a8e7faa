"""What a recipe may say about the learner, and what the learner says about a step.

No torch here: recipes are read on machines that have none.
"""

from typing import Literal

import msgspec

LossKind = Literal["stream_grpo", "ppo_clip", "grpo", "sft"]
"""The keys of `OBJECTIVES` in loss.py, which says what each reads and needs."""


class LossConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which objective, and its bounds. Ratios are policy over behaviour probability of one token."""

    kind: LossKind = "stream_grpo"  # the objective
    ratio_cap: float = 5.0  # stream_grpo: the weight of a token never exceeds it
    delta: float = 0.2  # stream_grpo: how far a probability may have moved the way its advantage pushes
    anchor: float = 1e-3  # stream_grpo: weight of the squared log-ratio
    # stream_grpo: a trajectory with one ratio outside [veto_low, veto_high] is not trained at all
    veto_low: float = 1e-4
    veto_high: float = 100.0  # stream_grpo: the upper bound of the same
    clip_low: float = 0.2  # ppo_clip: ratios are clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.28  # ppo_clip: the upper bound of the same
    # weight of the divergence from the weights the run started with; 0 keeps no copy of them
    reference_kl: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.veto_low < 1 < self.veto_high:
            raise ValueError("learner.loss: veto_low and veto_high must enclose 1, as in 1e-4 and 100")
        if not 0 < self.clip_low < 1 or self.clip_high <= 0:
            raise ValueError("learner.loss: clip_low must lie in (0, 1) and clip_high above 0")
        if min(self.ratio_cap, self.delta) <= 0 or min(self.anchor, self.reference_kl) < 0:
            raise ValueError(
                "learner.loss: ratio_cap and delta must be above 0, anchor and reference_kl 0 or above"
            )


class LearnerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Optimizer, schedule, memory and layout. A step consumes one batch, in one or more updates."""

    lr: float  # peak learning rate of Adam
    lr_min: float = 0.0  # learning rate from decay_steps on
    warmup_steps: int = 0  # the learning rate rises linearly over so many steps
    decay_steps: int = 0  # the learning rate falls linearly to lr_min at this step; 0 keeps it constant
    betas: tuple[float, float] = (0.9, 0.95)  # of Adam
    eps: float = 1e-8  # of Adam
    weight_decay: float = 0.0  # of Adam, decoupled
    clip_grad: float = 1.0  # largest norm of the gradient; larger ones are scaled down to it
    micro_batch_tokens: int = 8192  # positions of one forward pass, and so the longest sample
    num_minibatches: int = 1  # optimizer updates per pass over a batch
    num_epochs: int = 1  # passes over a batch
    # substrings of Megatron parameter names, such as ".mlp."; empty trains all
    train_only: tuple[str, ...] = ()
    tensor_parallel: int = 1  # processes that share each layer
    pipeline_parallel: int = 1  # processes that share the layers
    distributed_optimizer: bool = False  # divide the optimizer's state among the data-parallel processes
    dtype: Literal["fp32", "bf16"] = "bf16"  # of weights and activations; the optimizer works in fp32
    loss: LossConfig = msgspec.field(default_factory=LossConfig)
    snapshots_kept: int = 0  # host copies of past weights, for log-probs under the weights that drew a token
    seed: int = 0  # of the order of samples within a step

    def __post_init__(self) -> None:
        positive = (
            "micro_batch_tokens",
            "num_minibatches",
            "num_epochs",
            "tensor_parallel",
            "pipeline_parallel",
        )
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"learner.{name} must be 1 or more, not {getattr(self, name)}")
        for name in ("warmup_steps", "decay_steps", "snapshots_kept"):
            if getattr(self, name) < 0:
                raise ValueError(f"learner.{name} must be 0 or more, not {getattr(self, name)}")
        if self.lr <= 0 or not 0 <= self.lr_min <= self.lr:
            raise ValueError("learner.lr must be above 0, and learner.lr_min between 0 and learner.lr")
        if 0 < self.decay_steps <= self.warmup_steps:
            raise ValueError(
                "learner.decay_steps counts from the first step: set it above learner.warmup_steps"
            )

    def lr_at(self, step: int) -> float:
        """Learning rate of a step (first: 1): linear up in the warm-up, then constant or linear down."""
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if not self.decay_steps:
            return self.lr
        remaining = max(self.decay_steps - step, 0) / (self.decay_steps - self.warmup_steps)
        return self.lr_min + (self.lr - self.lr_min) * remaining


class NotFinite(msgspec.Struct, frozen=True, kw_only=True):
    """A batch was skipped because its loss or gradient was not a finite number."""

    what: Literal["loss", "gradient"]


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did. Shares are of trained tokens, over all updates of the step."""

    step: int
    loss: float  # per trained token
    grad_norm: float  # before clipping; mean over the updates
    lr: float
    num_trained_tokens: int  # of the batch, however often it was passed over
    num_microbatches: int  # forward passes of the busiest data-parallel rank
    num_updates: int
    entropy: float  # nats per trained token
    ratio_mean: float
    ratio_max: float
    ess_share: float  # effective sample size of the weights over the number of tokens, in (0, 1]
    masked_share: float  # outside the trust region, or clipped
    vetoed_share: float  # in trajectories dropped for one impossible ratio
    behaviour_kl: float  # estimate of KL(behaviour || policy), nats per token
    reference_kl: float  # estimate of KL(policy || starting weights), nats per token; 0 where not kept
    train_s: float
