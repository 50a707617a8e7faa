"""The learner's settings in a recipe, and its metrics of a step.

No torch here: recipes are read on machines that have none.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, get_args

import msgspec

from pipeline.journal.rows import LagMetrics, SignalMetrics
from pipeline.message import Amount, Count, Line, PositiveAmount, PositiveCount, Share

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
"""The keys of `OBJECTIVES` in objectives/registry.py, where the settings and requirements of each are."""

CORRECTIONS: Mapping[LossKind, str] = {
    "stream_grpo": "a weight of min(pi / mu, {ratio_cap}) for each token, none outside the trust region, and a veto of impossible ratios",
    "cispo": "a weight of min(pi / mu, {ratio_cap}) for each token",
    "grpo": "the clipped ratio pi / mu of each token",
    "dr_grpo": "the clipped ratio pi / mu of each token",
    "gspo": "the clipped geometric mean of pi / mu over a trajectory, so not token by token",
    "decoupled_ppo": "a weight of p / mu for each token, 0 above {ratio_cap}",
    "tis": "a weight of min(p / mu, {ratio_cap}) for each token",
    "icepop": "a weight of p / mu for each token, 0 below {ratio_floor} and above {ratio_cap}",
    "topr": "a weight of min(pi / mu, {ratio_cap}) for tokens with a negative advantage, and nothing for the others",
}
"""What each objective does about log-probs of engines (mu) that differ from the learner's (pi; p at the start of a step)."""

UNCORRECTED: tuple[LossKind, ...] = ("reinforce", "sft")
"""The objectives that do not read the log-probs of engines."""

Recompute = Literal["none", "selective", "full"]

Aggregation = Literal["token", "trajectory", "constant"]

AtLeastOne = Annotated[float, msgspec.Meta(ge=1, le=3e38)]
Decay = Annotated[float, msgspec.Meta(ge=0, lt=1)]  # of a moving average
NamePart = Annotated[str, msgspec.Meta(min_length=1)]


class LossConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Loss that a step minimises: [learning.md](learning.md). A ratio is the policy's probability of a token over the one that it was
    sampled with. A bound that is left out is the objective's own, which is in the table there; a key that it does not use only
    brings a warning.
    """

    kind: LossKind = "stream_grpo"  # name of the objective
    # Objective of your own in place of `kind`: a Python file and a function in it, as in "my.py:name".
    objective: Line = ""
    # Largest weight or ratio of a token; some objectives cut larger ones to it, others do not train such tokens.
    ratio_cap: AtLeastOne | None = None
    ratio_floor: Share | None = None  # ratio below which icepop does not train a token
    # Largest distance that a probability may have moved the way its advantage pushes it; used by stream_grpo.
    delta: PositiveAmount | None = None
    anchor: Amount | None = None  # weight of the squared log-ratio in stream_grpo
    # Lower bound of ratios in stream_grpo: a trajectory with one token below it is not trained at all.
    veto_low: Share | None = None
    # Upper bound of ratios in stream_grpo: a trajectory with one token above it is not trained at all.
    veto_high: AtLeastOne | None = None
    # Distance below 1 to which a clipped surrogate clips ratios: to 1 - clip_low at least.
    clip_low: Share | None = None
    # Distance above 1 to which a clipped surrogate clips ratios: to 1 + clip_high at most.
    clip_high: Amount | None = None
    # Bound of a clipped surrogate: a token with a negative advantage A counts at most dual_clip times |A|; 0 removes the bound.
    dual_clip: Amount | None = None
    # Source of the log-probs under the weights at the start of a step with several updates, which decoupled_ppo, tis and icepop need.
    # "recompute": a forward pass. "log_linear": interpolation by lag between the engine's log-probs and the present ones.
    proximal: Literal["recompute", "log_linear"] = "recompute"
    # Divisor of the sum over tokens. "token": their number. "trajectory": each trajectory's number of tokens for its own sum, then the
    # number of trajectories. "constant": constant_tokens for each trajectory. The objective's own by default.
    aggregation: Aggregation | None = None
    constant_tokens: PositiveCount = 1024  # number of tokens that aggregation = "constant" divides by
    # Bounds such as [0.99, 1.01]: a trajectory whose ratios have a geometric mean outside them is not trained, whatever the objective.
    geometric_mask: tuple[PositiveAmount, PositiveAmount] | None = None
    # Weight of the divergence from the weights that the run started with; 0 keeps no copy of them.
    reference_kl: Amount = 0.0
    # Estimate of the divergence of reference_kl from the log-ratio d. "k1": d, as a cost in the advantage. "k2": d^2 / 2. "k3":
    # exp(-d) - 1 + d.
    reference_kl_kind: Literal["k1", "k2", "k3"] = "k2"
    # Weight of the entropy of the distribution at each trained token, which the loss then raises
    entropy: Amount = 0.0

    def __post_init__(self) -> None:
        for fault in self._faults():
            raise ValueError(f"learner.loss{fault}")

    def _faults(self) -> Iterator[str]:
        path, colon, name = self.objective.rpartition(":")
        if self.objective and not (colon and path.endswith(".py") and name.isidentifier()):
            yield f'.objective is "{self.objective}"; write it as "my.py:name", a Python file and a function in it'
        if self.objective and self.kind != "stream_grpo":
            yield f'.objective is used in place of learner.loss.kind = "{self.kind}": remove one of the two'
        if self.kind == "sft" and self.reference_kl and self.reference_kl_kind == "k1":
            yield '.reference_kl_kind = "k1" is a cost in the advantage, which sft does not use: choose "k2" or "k3"'
        if self.dual_clip is not None and self.dual_clip != 0 and self.dual_clip <= 1:
            yield f".dual_clip is {self.dual_clip:g}; it must be above 1, or 0 for none"
        if self.geometric_mask is not None and not self.geometric_mask[0] < 1 < self.geometric_mask[1]:
            yield ".geometric_mask must enclose 1, as in [0.99, 1.01]"


LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

LORA_TARGETS: tuple[LoraTarget, ...] = get_args(LoraTarget)


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low-rank adapters that are trained in place of the model's own weights."""

    rank: Count = 0  # width of the adapters; 0 trains the weights themselves
    alpha: PositiveAmount = 32.0  # numerator of the factor alpha / rank on what an adapter adds
    targets: tuple[LoraTarget, ...] = LORA_TARGETS  # projections of each layer that get an adapter

    def __post_init__(self) -> None:
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise ValueError("learner.lora.targets must name at least one projection, and each once")


class LearnerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Optimizer, schedule, memory and layout. A step consumes one batch, in one or more updates."""

    lr: PositiveAmount  # peak learning rate of Adam
    lr_min: Amount = 0.0  # learning rate from step decay_steps on
    warmup_steps: Count = 0  # number of steps over which the learning rate rises linearly
    # Step at which the learning rate has fallen linearly to lr_min; 0 keeps it constant.
    decay_steps: Count = 0
    betas: tuple[Decay, Decay] = (0.9, 0.95)  # decay rates of Adam's two moving averages
    # Term of Adam that keeps it from dividing by zero.
    eps: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1e-8
    weight_decay: Amount = 0.0  # weight decay of Adam, decoupled from the gradient
    # Largest norm of the gradient; larger ones are scaled down to it; 0 turns this off.
    clip_grad: Amount = 1.0
    # Number of positions of one forward pass, and so of the longest sample.
    micro_batch_tokens: PositiveCount = 8192
    num_minibatches: PositiveCount = 1  # number of optimizer updates per pass over a batch
    num_epochs: PositiveCount = 1  # number of passes over a batch
    # Substrings of Megatron parameter names, such as ".mlp."; empty trains all
    train_only: tuple[NamePart, ...] = ()
    tensor_parallel: PositiveCount = 1  # number of processes that share each layer
    # Divide among the tensor-parallel processes also the activations between the parts of a layer that they share.
    sequence_parallel: bool = False
    context_parallel: PositiveCount = 1  # number of processes that share the positions of each micro-batch
    pipeline_parallel: PositiveCount = 1  # number of processes that share the layers
    # Number of processes that share the experts of each layer; they are taken from those of tensor, context and data parallelism
    expert_parallel: PositiveCount = 1
    # Send each token to the experts that the engine sent it to, rather than to those that the router prefers by now; engines
    # need --enable-return-routed-experts.
    routing_replay: bool = False
    # Activations that the backward pass computes again. "selective": those inside each MLP or mixture of experts; "full": all except
    # each layer's input; "none": none.
    recompute: Recompute = "none"
    distributed_optimizer: bool = False  # divide the optimizer's state among the data-parallel processes
    offload_optimizer: bool = False  # keep the optimizer's state on the host but during updates
    dtype: Literal["fp32", "bf16"] = "bf16"  # type of weights and activations; the optimizer works in fp32
    # Type of the logits: as `dtype`, or fp32 from the same weights.
    head_dtype: Literal["model", "fp32"] = "model"
    head_chunk_tokens: PositiveCount = 1024  # number of rows of logits that exist at a time
    loss: LossConfig = msgspec.field(default_factory=LossConfig)
    lora: LoraConfig = msgspec.field(default_factory=LoraConfig)
    # Number of copies of past weights on the host, for log-probs under the weights that drew a token.
    snapshots_kept: Count = 0
    seed: Count = 0  # seed of the order of samples within a step

    def __post_init__(self) -> None:
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError(
                "learner.sequence_parallel divides activations among tensor-parallel processes: set learner.tensor_parallel to "
                "2 or more, or sequence_parallel to false"
            )
        if self.lr_min > self.lr:
            raise ValueError(
                f"learner.lr_min is {self.lr_min:g}; it must be between 0 and learner.lr = {self.lr:g}"
            )
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
        """The number of processes that together hold one copy of the model and work on the same micro-batch."""
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
"""The number of lags that are counted separately; the last one includes all larger lags."""


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of one step. Shares are shares of the trained tokens, over all updates of the step."""

    step: int
    loss: float  # the sum divided as learner.loss.aggregation says
    grad_norm: float  # before clipping; mean over the updates
    lr: float
    num_trained_tokens: int  # trained tokens of the batch, each counted once whatever the number of passes
    num_microbatches: int  # forward passes of the busiest data-parallel rank
    num_updates: int
    entropy: float  # nats per trained token
    ratio_mean: float
    ratio_max: float
    ess_share: float  # effective sample size of the weights over the number of tokens, in (0, 1]
    masked_share: float  # share of tokens outside the trust region, or clipped
    vetoed_share: float  # share of tokens in trajectories dropped for one impossible ratio
    behaviour_kl: float  # estimate of KL(behaviour || policy), nats per token
    reference_kl: float  # estimate of KL(policy || starting weights), nats per token; 0 where not kept
    train_s: float  # seconds of the whole step, including work that none of the next three covers:
    forward_s: float
    backward_s: float
    optimizer_s: float
    # Model FLOPs over the peak of all devices in train_s; None where the peak is not known.
    utilisation: float | None = None
    by_lag: tuple[LagMetrics, ...] = ()  # one entry for each lag of a trained token, in order
    signal: SignalMetrics | None = None  # the shares by signal; None: no token has a signal
