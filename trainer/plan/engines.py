"""Engines and episodes: the capacity of engines, their speed by the roofline model, the length of episodes, and the number that must run at
once.

Speeds are estimates: a step of decoding reads all weights and the KV cache of every running request once, a prompt costs two operations for
each weight and token. The two constants below are the shares of the peaks that SGLang reaches; nothing here was measured on a GPU.

The number of episodes follows from Little's law. Lengths come from a run's journal if one is given, otherwise from the recipe's table
[plan], and from its limits where the table does not set them.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import msgspec
from msgspec.structs import replace

from pipeline.journal.reading import journal_of, read
from pipeline.journal.rows import EpisodeRow
from trainer.learner.architecture import Architecture
from trainer.learner.devices import GpuGroup
from trainer.learner.precision import fp8_faults, version_bytes
from trainer.plan.division import active_share, num_active_parameters
from trainer.recipe import PlanRecipe, Recipe

BYTES_PER_VALUE = 2  # weights and KV cache in bf16
OPERATIONS_PER_WEIGHT = 2  # a multiplication and an addition; in FP8 too they are counted at the peak of bf16
# SGLang gives layers with a window, in models that have other layers too, cache for this share of the tokens (--swa-full-tokens-ratio)
WINDOWED_SHARE = 0.8
STATE_BYTES_PER_VALUE = 4  # SGLang keeps the states of linear attention in fp32
MEMORY_EFFICIENCY = 0.6  # share of the memory's peak speed that decoding reaches
COMPUTE_EFFICIENCY = 0.5  # share of the peak of matrix products that reading prompts reaches


class EnginePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The layout and the memory of the engines, which are all alike."""

    gpus: GpuGroup
    num_engines: int
    gpus_per_engine: int
    weight_bytes: int  # this and the following are bytes of one GPU
    usable_bytes: int  # room for weights and KV cache
    kv_bytes_per_token: int  # cache that SGLang allocates for a token of context
    windowed_bytes_per_token: int  # keys and values of a token in the layers that have a window
    window: int | None  # number of positions that these layers attend to
    active_weight_bytes: int  # weights that one token needs
    active_weights: int  # the number of these
    state_bytes: int = 0  # what linear attention keeps of a request, however long it is

    @property
    def kv_tokens(self) -> int:
        """The number of tokens that the KV cache of one engine holds; 0 if not even the weights fit."""
        return max(self.usable_bytes - self.weight_bytes, 0) // self.kv_bytes_per_token

    def context_bytes(self, context_tokens: float) -> float:
        """The bytes of a GPU for one context."""
        return context_tokens * self.kv_bytes_per_token + self.state_bytes

    def read_bytes(self, context_tokens: float) -> float:
        """The bytes of a context that a GPU reads for its next token. Windowed layers read their window."""
        whole = self.kv_bytes_per_token - WINDOWED_SHARE * self.windowed_bytes_per_token
        in_window = min(context_tokens, self.window or context_tokens)
        return context_tokens * whole + in_window * self.windowed_bytes_per_token + self.state_bytes

    def episodes_held(self, context_tokens: int) -> int:
        """The number of episodes whose contexts of `context_tokens` fit into the memory of all engines beside their weights."""
        free_bytes = max(self.usable_bytes - self.weight_bytes, 0)
        return self.num_engines * int(free_bytes // self.context_bytes(context_tokens))

    def decode_s_per_token(self, num_running: float, context_tokens: float) -> float:
        """Seconds for one token of each request when an engine runs `num_running` with contexts of `context_tokens`."""
        device = self.gpus.device
        read_bytes = min(
            self.weight_bytes, self.active_weight_bytes * max(num_running, 1)
        ) + num_running * self.read_bytes(context_tokens)
        operations = num_running * OPERATIONS_PER_WEIGHT * self.active_weights
        return max(
            read_bytes / (device.memory_bytes_per_s * MEMORY_EFFICIENCY),
            operations / (device.flops_per_s * COMPUTE_EFFICIENCY),
        )

    def prompt_tokens_per_s(self) -> float:
        """The prompt speed of one engine that does nothing else."""
        return (
            self.gpus.device.flops_per_s * COMPUTE_EFFICIENCY / (OPERATIONS_PER_WEIGHT * self.active_weights)
        )


def plan_engines(
    architecture: Architecture, plan: PlanRecipe, gpus: GpuGroup, *, fp8_except: Sequence[str] | None = None
) -> EnginePlan:
    """The plan of the engines. `fp8_except`: the modules that are left out of weights in FP8; None: all are in bf16. Raises ValueError if
    the layout of an engine does not divide the model or the GPUs, and if its GPUs have no FP8.
    """
    size = plan.engine_gpus
    if architecture.num_heads % size:
        raise ValueError(
            f"plan.engine_gpus = {size} does not divide the model's {architecture.num_heads} attention heads: set it to a divisor"
        )
    if gpus.count < size:
        raise ValueError(
            f"plan.engine_gpus = {size}, but only {gpus.count} GPUs are left for engines: lower it or give more GPUs"
        )
    # Each GPU holds at least one key-value head, so some are held twice where there are fewer heads than GPUs.
    kv_heads = max(architecture.num_key_value_heads / size, 1)
    layer_bytes = 2 * kv_heads * architecture.head_width * BYTES_PER_VALUE
    num_windowed = len(architecture.windowed_layers)
    if num_windowed == architecture.num_attention_layers:
        num_windowed = 0  # SGLang holds the whole context of a model whose layers all have a window
    num_whole = architecture.num_attention_layers - num_windowed
    if fp8_except is not None:
        _check_fp8(architecture, size, gpus)
    active = num_active_parameters(architecture)
    return EnginePlan(
        gpus=gpus,
        num_engines=gpus.count // size,
        gpus_per_engine=size,
        weight_bytes=_weight_bytes(architecture, fp8_except) // size,
        usable_bytes=int(gpus.device.memory_bytes * plan.engine_memory_share),
        kv_bytes_per_token=int(layer_bytes * (num_whole + WINDOWED_SHARE * num_windowed)),
        windowed_bytes_per_token=int(layer_bytes * num_windowed),
        window=architecture.window if num_windowed else None,
        active_weight_bytes=_weight_bytes(architecture, fp8_except, active_share(architecture)) // size,
        active_weights=active // size,
        state_bytes=_state_bytes(architecture) // size,
    )


def _weight_bytes(architecture: Architecture, fp8_except: Sequence[str] | None, share: float = 1.0) -> int:
    """The bytes of an engine's weights, of which a `share` of the experts counts."""
    return version_bytes(architecture, value_bytes=BYTES_PER_VALUE, fp8_except=fp8_except, share=share)


def _check_fp8(architecture: Architecture, engine_gpus: int, gpus: GpuGroup) -> None:
    """Raises ValueError if engines on these GPUs cannot compute with weights in FP8."""
    for fault in fp8_faults(architecture, engine_gpus=engine_gpus):
        raise ValueError(fault)
    if not gpus.device.has_fp8:
        raise ValueError(
            f'weights.precision = "fp8": {gpus.device.name} computes no products in FP8, and SGLang rearranges such weights for it when it '
            'starts, and takes no others later: plan engines on H100, H200, L40S or later ones, or set weights.precision = "learner", with '
            "the model in bf16"
        )


def _state_bytes(architecture: Architecture) -> int:
    """Bytes of the states of linear attention of one request, and of the positions that its convolutions still need."""
    net = architecture.delta_net
    if net is None:
        return 0
    states = net.num_value_heads * net.key_width * net.value_width * STATE_BYTES_PER_VALUE
    positions = net.num_key_heads * net.convolved_width * (net.kernel - 1) * BYTES_PER_VALUE
    return len(net.layers) * (states + positions)


SAMPLED_SHARE = 0.3  # share of an episode's tokens that the policy samples, where nothing is known
ROUNDS = 40  # iterations of the fixed point between the episodes that run and their length; about ten suffice


class EpisodeLength(msgspec.Struct, frozen=True, kw_only=True):
    """The length of the mean episode."""

    turns: float
    tokens: float  # length of its last context: prompt, replies and observations
    sampled_tokens: float
    tool_s: float  # time in which no engine works on it: commands, containers, grading
    # Time from claim to verdict, where it is known; None: it follows from the engines' speed.
    seconds: float | None
    source: str  # source of the numbers, for display
    opening_tokens: int = 0  # tokens, of `tokens`, that an agent program sends before the task


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Episodes that must run at once so that the learner never waits, and what limits them."""

    num_needed: int  # 0: the engines cannot keep up with the learner, however many episodes run
    episode_s: float  # length with num_needed at once, or with num_possible if that is less
    num_possible: int  # number that slots, admission and the KV cache allow
    episodes_per_s: float  # rate with num_possible at once, or with num_needed if that is less


def episode_length(recipe: Recipe, run_dir: Path | None, *, opening_tokens: int = 0) -> EpisodeLength:
    """The length of an episode; each context contains the `opening_tokens` of an agent program.

    Raises ValueError if `run_dir` holds no finished episode.
    """
    if run_dir is not None:
        return replace(_measured(run_dir), opening_tokens=opening_tokens)
    plan, limits = recipe.plan, recipe.rollout.limits
    turns = plan.episode_turns or max(limits.turns / 2, 1)
    tokens = plan.episode_tokens or (opening_tokens + limits.context_tokens) / 2
    given = [plan.episode_turns, plan.episode_tokens, plan.episode_sampled_tokens]
    return EpisodeLength(
        turns=turns,
        tokens=tokens,
        sampled_tokens=plan.episode_sampled_tokens or max(tokens - opening_tokens, 0) * SAMPLED_SHARE,
        tool_s=turns * plan.command_s + plan.grade_s,
        seconds=plan.episode_s,
        source="given" if all(given) else "assumed from the recipe's limits, except for what [plan] gives",
        opening_tokens=opening_tokens,
    )


def _measured(run_dir: Path) -> EpisodeLength:
    rows = [
        row
        for row in read(journal_of(run_dir), EpisodeRow)
        if row.purpose == "train" and row.num_turns and row.claimed_at and row.finished_at
    ]
    if not rows:
        raise ValueError(f"--measured {run_dir}: its journal holds no finished training episode")
    seconds = fmean([row.finished_at - row.claimed_at for row in rows])
    return EpisodeLength(
        turns=fmean([row.num_turns for row in rows]),
        tokens=fmean([row.num_tokens for row in rows]),
        sampled_tokens=fmean([row.sampled_tokens for row in rows]),
        tool_s=0.0,
        seconds=seconds,
        source=f"measured over {len(rows)} episodes of {run_dir}",
    )


def episode_s(length: EpisodeLength, engines: EnginePlan, num_at_once: float) -> float:
    """Seconds of an episode if `num_at_once` run: tools, prompts, and replies at the resulting speed of each request."""
    if length.seconds is not None:
        return length.seconds
    # A context grows from its opening to its end; the radix cache holds its unchanged prefix.
    context_tokens, told_tokens = length.tokens / 2, length.tokens - length.sampled_tokens
    seconds = length.tool_s
    for _ in range(ROUNDS):
        generating = num_at_once * max(1 - length.tool_s / seconds, 0.01) / engines.num_engines
        reading_s = told_tokens / engines.prompt_tokens_per_s() * max(generating, 1)
        replying_s = length.sampled_tokens * engines.decode_s_per_token(generating, context_tokens)
        seconds = (seconds + length.tool_s + reading_s + replying_s) / 2
    return seconds


def demand(length: EpisodeLength, engines: EnginePlan, *, episodes_per_s: float, num_possible: int) -> Demand:
    """Little's law: the number of running episodes is the number that end per second times the seconds that each takes."""
    most = max(num_possible * 16, 4096)
    needed = _least(lambda count: count >= episodes_per_s * episode_s(length, engines, count), most)
    running = min(needed or num_possible, num_possible)
    seconds = episode_s(length, engines, running)
    return Demand(
        num_needed=needed,
        episode_s=seconds,
        num_possible=num_possible,
        episodes_per_s=running / seconds,
    )


def _least(holds: Callable[[int], bool], most: int) -> int:
    """The smallest count up to `most` that satisfies `holds`; 0 if there is none. If a count satisfies it, all larger ones must."""
    if not holds(most):
        return 0
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
