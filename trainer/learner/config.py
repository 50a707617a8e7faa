"""What a recipe may say about the learner, and what the learner says about a step.

No torch here: recipes are read on machines that have none.
"""

import math
from collections.abc import Iterator
from typing import Literal, get_args

import msgspec

LossKind = Literal[
    "stream_grpo",
    "cispo",
    "grpo",
    "dr_grpo",
    "gspo",
    "decoupled_ppo",
    "tis",
    "icepop",
    "topr",
    "reinforce",
    "sft",
]
"""The keys of `OBJECTIVES` in objectives/registry.py, which has the numbers and the needs of each."""

Aggregation = Literal["token", "trajectory", "constant"]


class LossConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a step minimises: [learning.md](learning.md). A ratio is the policy's probability of a token over the one that it was
    sampled with. A bound that is left out is the objective's own, which is in the table there; a key that it does not use only
    brings a warning.
    """

    kind: LossKind = "stream_grpo"  # the objective
    # An objective of one's own in place of `kind`: a Python file and a function in it, as in "my.py:name".
    objective: str = ""
    # the largest weight or ratio of a token: larger ones are cut to it, or not trained
    ratio_cap: float | None = None
    ratio_floor: float | None = None  # icepop: a token whose ratio is below is not trained
    # stream_grpo: how far a probability may have moved the way its advantage pushes
    delta: float | None = None
    anchor: float | None = None  # stream_grpo: weight of the squared log-ratio
    # stream_grpo: a trajectory with one ratio below veto_low or above veto_high is not trained at all.
    veto_low: float | None = None
    veto_high: float | None = None  # stream_grpo: the upper bound of the same
    # of a clipped surrogate: ratios are clipped to [1 - clip_low, 1 + clip_high]
    clip_low: float | None = None
    clip_high: float | None = None  # the upper bound of the same
    # Of a clipped surrogate: a token with a negative advantage A counts at most dual_clip times |A|; 0: without that bound.
    dual_clip: float | None = None
    # decoupled_ppo, tis and icepop, in steps of several updates: how the log-probs under the weights at the start of the step are
    # known. recompute: by a forward pass. log_linear: between those of the engine and the present ones, by lag.
    proximal: Literal["recompute", "log_linear"] = "recompute"
    # What the sum over tokens is divided by. token: their number. trajectory: each trajectory's by its own number, then by the number of
    # trajectories. constant: constant_tokens for each trajectory. By default the objective's own.
    aggregation: Aggregation | None = None
    constant_tokens: int = 1024  # for aggregation = "constant"
    # A trajectory whose ratios have a geometric mean outside these two bounds is not trained, as in [0.99, 1.01]. With any objective.
    geometric_mask: tuple[float, float] | None = None
    # Weight of the divergence from the weights that the run started with; 0 keeps no copy of them.
    reference_kl: float = 0.0
    # How that divergence is estimated from the log-ratio d. k1: d, as a cost in the advantage. k2: d^2 / 2. k3: exp(-d) - 1 + d.
    reference_kl_kind: Literal["k1", "k2", "k3"] = "k2"
    # weight of the entropy of the distribution at each trained token, which the loss then raises
    entropy: float = 0.0

    def __post_init__(self) -> None:
        for fault in self._faults():
            raise ValueError(f"learner.loss{fault}")

    def _faults(self) -> Iterator[str]:
        path, colon, name = self.objective.rpartition(":")
        if self.objective and not (colon and path.endswith(".py") and name.isidentifier()):
            yield f'.objective is "{self.objective}"; write it as "my.py:name", a Python file and a function in it'
        if self.objective and self.kind != "stream_grpo":
            yield f'.objective stands in place of learner.loss.kind = "{self.kind}": remove one of the two'
        if self.kind == "sft" and self.reference_kl and self.reference_kl_kind == "k1":
            yield '.reference_kl_kind = "k1" is a cost in the advantage, which sft does not use: choose "k2" or "k3"'
        ranges = {
            "ratio_cap": (1.0, math.inf),
            "ratio_floor": (0.0, 1.0),
            "delta": (math.ulp(0), math.inf),
            "anchor": (0.0, math.inf),
            "veto_low": (0.0, 1.0),
            "veto_high": (1.0, math.inf),
            "clip_low": (0.0, 1.0),
            "clip_high": (0.0, math.inf),
            "reference_kl": (0.0, math.inf),
            "entropy": (0.0, math.inf),
            "constant_tokens": (1, math.inf),
        }
        for field, (least, most) in ranges.items():
            value = getattr(self, field)
            if value is not None and not least <= value <= most:
                yield f".{field} is {value:g}; it must be {_range_words(least, most)}"
        if self.dual_clip is not None and self.dual_clip != 0 and self.dual_clip <= 1:
            yield f".dual_clip is {self.dual_clip:g}; it must be above 1, or 0 for none"
        if self.geometric_mask is not None and not self.geometric_mask[0] < 1 < self.geometric_mask[1]:
            yield ".geometric_mask must enclose 1, as in [0.99, 1.01]"


def _range_words(least: float, most: float) -> str:
    if most < math.inf:
        return f"between {least:g} and {most:g}"
    return "above 0" if 0 < least < 1 else f"{least:g} or above"


LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

LORA_TARGETS: tuple[LoraTarget, ...] = get_args(LoraTarget)


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low-rank adapters that are trained in place of the model's own weights."""

    rank: int = 0  # width of the adapters; 0 trains the weights themselves
    alpha: float = 32.0  # what an adapter adds is multiplied by alpha / rank
    targets: tuple[LoraTarget, ...] = LORA_TARGETS  # the projections that get an adapter

    def __post_init__(self) -> None:
        if self.rank < 0 or self.alpha <= 0:
            raise ValueError("learner.lora: rank must be 0 or more and alpha above 0")
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise ValueError("learner.lora.targets must name at least one projection, and each once")


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
    # divide among the tensor-parallel processes also what lies between the parts of a layer that they share
    sequence_parallel: bool = False
    context_parallel: int = 1  # processes that share the positions of each micro-batch
    pipeline_parallel: int = 1  # processes that share the layers
    # processes that share the experts of each layer; they are taken from those of tensor and data parallelism
    expert_parallel: int = 1
    # send each token to the experts that the engine sent it to, rather than to those that the router prefers by now; engines
    # need --enable-return-routed-experts
    routing_replay: bool = False
    # activations that the backward pass computes again: selective, those inside each MLP or mixture of
    # experts; full, all but each layer's input
    recompute: Literal["none", "selective", "full"] = "none"
    distributed_optimizer: bool = False  # divide the optimizer's state among the data-parallel processes
    offload_optimizer: bool = False  # keep the optimizer's state on the host but during updates
    dtype: Literal["fp32", "bf16"] = "bf16"  # of weights and activations; the optimizer works in fp32
    head_dtype: Literal["model", "fp32"] = "model"  # of the logits: as `dtype`, or fp32 from the same weights
    head_chunk_tokens: int = 1024  # rows of logits that exist at a time
    loss: LossConfig = msgspec.field(default_factory=LossConfig)
    lora: LoraConfig = msgspec.field(default_factory=LoraConfig)
    snapshots_kept: int = 0  # host copies of past weights, for log-probs under the weights that drew a token
    seed: int = 0  # of the order of samples within a step

    def __post_init__(self) -> None:
        positive = (
            "micro_batch_tokens",
            "head_chunk_tokens",
            "num_minibatches",
            "num_epochs",
            "tensor_parallel",
            "pipeline_parallel",
            "expert_parallel",
            "context_parallel",
        )
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"learner.{name} must be 1 or more, not {getattr(self, name)}")
        for name in ("warmup_steps", "decay_steps", "snapshots_kept"):
            if getattr(self, name) < 0:
                raise ValueError(f"learner.{name} must be 0 or more, not {getattr(self, name)}")
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError(
                "learner.sequence_parallel divides activations among tensor-parallel processes: set learner.tensor_parallel to "
                "2 or more, or sequence_parallel to false"
            )
        if self.lr <= 0 or not 0 <= self.lr_min <= self.lr:
            raise ValueError("learner.lr must be above 0, and learner.lr_min between 0 and learner.lr")
        if self.lora.rank and self.train_only:
            raise ValueError(
                "learner.train_only chooses among the model's own weights, and learner.lora.rank freezes them: set one of the two"
            )
        if 0 < self.decay_steps <= self.warmup_steps:
            raise ValueError(
                "learner.decay_steps counts from the first step: set it above learner.warmup_steps"
            )

    @property
    def replica_processes(self) -> int:
        """Processes that together hold one copy of the model and work on the same micro-batch."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

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


NUM_LAGS = 32
"""Lags that are told apart; the last stands for itself and all above it."""


class LagMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did to the tokens of one lag. The shares are as in StepMetrics, of these tokens alone."""

    lag: int  # how many versions the weights that sampled the tokens are behind those that the step started from
    num_tokens: int  # over all updates of the step, so a token counts once per pass
    ess_share: float
    masked_share: float
    vetoed_share: float
    behaviour_kl: float


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did. Shares are of trained tokens, over all updates of the step."""

    step: int
    loss: float  # summed and divided as learner.loss.aggregation says
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
    train_s: float  # the whole step, with what is none of these three:
    forward_s: float
    backward_s: float
    optimizer_s: float
    # Model FLOPs over the peak of all devices in train_s; None where the peak is not known.
    utilisation: float | None = None
    by_lag: tuple[LagMetrics, ...] = ()  # for each lag of a trained token, in order
