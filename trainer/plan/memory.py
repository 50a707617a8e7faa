"""The memory of one process of the learner: the peak on its GPU, and its share of host memory.

State is exact. Activations are formulas in bytes per position of the whole micro-batch, even if a process works on a part of the positions.
They list the tensors that the modules keep for their backward pass; a test compares them with the bytes that the real modules keep, at the
shapes of one process. The additional memory of CUDA, NCCL and the allocator is an allowance. Pure arithmetic, no torch.

A `stream` is one vector of the model's width, which passes from layer to layer. With sequence parallelism each tensor-parallel process
keeps its part of the streams.
"""

import math
from collections.abc import Iterable, Sequence

import msgspec

from trainer.learner.architecture import Architecture
from trainer.learner.config import LearnerConfig
from trainer.learner.devices import GIB, Device
from trainer.plan.division import SUFFIX, Division, HeldParameter, parameters

VALUE_BYTES = {"bf16": 2, "fp32": 4}
FP32_BYTES = 4
INDEX_BYTES = 8
ANGLES = 2  # a cosine and a sine
DELTA_CHUNK = 64  # positions of a chunk of linear attention: CHUNK in trainer/learner/delta_rule.py


def saved_bytes(architecture: Architecture, config: LearnerConfig, *, is_linear: bool = False) -> float:
    """Bytes kept from the forward to the backward pass, per position, by a layer that has attention, or linear attention."""
    match config.recompute:
        case "full":
            return _stream(architecture, config)
        case "selective":
            return _outside_of_mlp(architecture, config, is_linear=is_linear)
        case "none":
            return layer_bytes(architecture, config, is_linear=is_linear)


def outer_bytes(architecture: Architecture, config: LearnerConfig) -> float:
    """Bytes kept outside of the layers, per position: the input of the last norm, and the angles of the rotary embedding."""
    angles = (
        ANGLES * FP32_BYTES * (architecture.rotary_width or architecture.head_width) / config.context_parallel
    )
    return _stream(architecture, config) + angles


def layer_bytes(architecture: Architecture, config: LearnerConfig, *, is_linear: bool = False) -> float:
    """Bytes that a layer keeps without recomputation, per position. A recomputed layer needs as much during its backward pass."""
    return _outside_of_mlp(architecture, config, is_linear=is_linear) + _mlp(architecture, config)


def rule_bytes(architecture: Architecture, config: LearnerConfig) -> float:
    """Bytes of what a delta net computes between its projections, per position. It is kept during the layer's backward pass only, which
    computes it again; nearly all of it is in fp32. A chunk has rows of its length for each position, and a state.
    """
    net = architecture.delta_net
    if net is None:
        return 0.0
    key, value, per_key = net.key_width, net.value_width, net.values_per_key
    # The inputs of the convolution, its result and the activated result
    convolved = 3 * net.convolved_width * VALUE_BYTES[config.dtype] / FP32_BYTES
    # Query and key on their way into the chunks and in two products of all pairs of a chunk
    of_key_head = 10 * key + 2 * DELTA_CHUNK
    # The gated norm and the values; the sides of a chunk's system, its reads and writes, the pairs of a chunk, and a state for each chunk
    of_value_head = 9 * value + 4 * key + 4 * DELTA_CHUNK + key * value / DELTA_CHUNK
    floats = net.num_key_heads * (convolved + of_key_head + per_key * of_value_head)
    return FP32_BYTES * floats / config.tensor_parallel / config.context_parallel


def head_bytes(architecture: Architecture, config: LearnerConfig, *, num_rows: int) -> int:
    """The peak memory of the head while it computes log-probs of `num_rows` trained positions and their gradients.

    The forward pass needs a chunk of logits and its exponentials in fp32; the backward pass needs a chunk in fp32 and in the weights' type,
    and the sum of the weights' gradient in fp32.
    """
    size = VALUE_BYTES[config.dtype]
    rows = -(-num_rows // config.context_parallel)
    columns = -(-architecture.vocab_size // config.tensor_parallel)
    chunk = min(rows, config.head_chunk_tokens) * columns
    rounding = size if config.dtype == "bf16" else 0
    of_weight = columns * architecture.width * (FP32_BYTES + rounding)
    hidden = 2 * rows * architecture.width * size
    return hidden + max(2 * FP32_BYTES * chunk, (FP32_BYTES + rounding) * chunk + of_weight)


def _stream(architecture: Architecture, config: LearnerConfig) -> float:
    return architecture.width * VALUE_BYTES[config.dtype] / _stream_parts(config)


def _stream_parts(config: LearnerConfig) -> int:
    return config.context_parallel * (config.tensor_parallel if config.sequence_parallel else 1)


def _outside_of_mlp(architecture: Architecture, config: LearnerConfig, *, is_linear: bool) -> float:
    """Bytes of the streams: the inputs and the results of the two norms; each norm has one scale."""
    scales = 2 * FP32_BYTES / _stream_parts(config)
    attention = _delta_net(architecture, config) if is_linear else _attention(architecture, config)
    return 4 * _stream(architecture, config) + scales + attention


def _delta_net(architecture: Architecture, config: LearnerConfig) -> float:
    """Bytes of what the first projection returns, and of what the second takes."""
    net = architecture.delta_net
    assert net is not None
    width = net.num_key_heads * net.group_width + net.num_value_heads * net.value_width
    return width * VALUE_BYTES[config.dtype] / config.tensor_parallel / config.context_parallel


def _attention(architecture: Architecture, config: LearnerConfig) -> float:
    """Bytes of the joint output of the three projections, and of the kernel's inputs and results. Keys and values have fewer heads. A gate
    is a part of the joint output; its sigmoid and the gated results are kept, too.
    """
    parts = config.context_parallel
    heads = architecture.num_heads / config.tensor_parallel
    groups = architecture.num_key_value_heads / config.tensor_parallel
    vector = architecture.head_width * VALUE_BYTES[config.dtype]
    joint = (heads + 2 * groups) * vector
    gates = heads * vector if architecture.gated else 0.0
    queries_and_outputs, keys = 2 * heads * vector, groups * vector
    log_sums = heads * FP32_BYTES
    norms = heads * vector + (heads + groups) * FP32_BYTES if architecture.normed_qk else 0.0
    if architecture.normed_together:
        # The keys of all heads are copied to be side by side, so nothing keeps the joint output for them.
        norms = (heads + groups) * vector + 2 * FP32_BYTES
    if parts == 1:
        return joint + 3 * gates + queries_and_outputs + keys + log_sums + norms
    # Keys and values go to each process of the group, so the kernel's values are not a view of the joint output, which is then kept
    # for the norms alone. The outputs exist twice, before and after they go back.
    keys *= parts / math.gcd(parts, int(groups))
    kernel = queries_and_outputs + 2 * keys + log_sums + heads * vector
    keeps_joint = architecture.normed_qk and not architecture.normed_together
    return (kernel + norms + (joint if keeps_joint else 0.0) + 3 * gates) / parts


def _mlp(architecture: Architecture, config: LearnerConfig) -> float:
    """Bytes of the joint output of gate and up projection, the activated gate, the up projection again, and their product. The first layers
    of a mixture, if they have no experts, count like the others.
    """
    size = VALUE_BYTES[config.dtype]
    if architecture.experts is None:
        return _dense(architecture.mlp_width, config)
    experts = architecture.experts
    # The product is kept before and after it is weighted, and of a clamped gate the gate after clamping and its sigmoid. Each chosen token
    # goes to its expert together with its weight and its index.
    num_widths = 6 if experts.gate_limit is None else 8
    per_choice = (num_widths * experts.width + architecture.width) * size + 2 * FP32_BYTES + 2 * INDEX_BYTES
    router = experts.count * (3 * FP32_BYTES + 1)
    routed = (experts.per_token * per_choice + router) / _stream_parts(config)
    return routed + _dense(experts.shared_width, config)


def grouped_bytes(architecture: Architecture, config: LearnerConfig) -> int:
    """Bytes of the copy of the larger matrices of a layer's experts on a process, and of their gradients, while they are multiplied."""
    experts = architecture.experts
    if experts is None:
        return 0
    num_values = experts.count // config.expert_parallel * 2 * experts.width * architecture.width
    return 2 * num_values * VALUE_BYTES[config.dtype]


def _dense(mlp_width: int, config: LearnerConfig) -> float:
    return 5 * mlp_width * VALUE_BYTES[config.dtype] / config.tensor_parallel / config.context_parallel


CONTEXT_BYTES = 2 * GIB  # CUDA's context, the buffers of NCCL and of cuBLAS
FRAGMENTATION_SHARE = 0.04  # share of a GPU that the allocator holds and cannot use

# CUDA's context and the buffers of NCCL, in the process that broadcasts weights to one engine.
SENDER_CONTEXT_BYTES = GIB
WEIGHT_BYTES = {"bf16": 2, "fp32": 4}
GRADIENT_BYTES = 4  # gradients are summed in fp32
# Adam's two moments, and with bf16 weights their fp32 originals.
OPTIMIZER_BYTES = {"bf16": 12, "fp32": 8}
# torch's Adam computes all square roots of a step before it uses the first.
UPDATE_BYTES = 4


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes of one process of the learner, by pipeline stage."""

    stage: int
    weights: int
    gradients: int
    optimizer: int
    activations: int  # activations of all micro-batches in flight that the backward pass needs
    logits: int  # logits of the LM head, at their largest
    senders: int  # processes on the first GPU that broadcast weights, one for each engine
    update: int  # memory of the optimizer's update, when there are no activations
    host_optimizer: int
    host_snapshots: int  # past and starting weights, and the present ones while others are used
    host_undo: int  # a copy of all of a step's weights and optimizer state, to undo a step of several updates
    host_checkpoint: int  # a copy of its part of weights and optimizer, kept from one checkpoint to the next

    @property
    def gpu_bytes(self) -> int:
        """The peak, which occurs in the backward pass or in the update."""
        state = self.weights + self.gradients + self.optimizer + self.senders
        return state + max(self.activations + self.logits, self.update)

    @property
    def host_bytes(self) -> int:
        return self.host_optimizer + self.host_snapshots + self.host_undo + self.host_checkpoint


def usable_bytes(device: Device) -> int:
    """The bytes that are available for tensors."""
    return int(device.memory_bytes * (1 - FRAGMENTATION_SHARE)) - CONTEXT_BYTES


def fullest_rank(
    architecture: Architecture, config: LearnerConfig, division: Division, *, num_senders: int = 0
) -> RankMemory:
    """The process with the highest GPU memory, among those of all pipeline stages.

    `num_senders` processes that broadcast weights are on the GPU of rank 0, which belongs to the first stage.
    """
    stages = (
        rank_memory(architecture, config, division, stage, num_senders=0 if stage else num_senders)
        for stage in range(division.pipeline)
    )
    return max(stages, key=lambda memory: memory.gpu_bytes)


def rank_memory(
    architecture: Architecture, config: LearnerConfig, division: Division, stage: int, *, num_senders: int = 0
) -> RankMemory:
    held = list(parameters(architecture, division, stage, config.lora))
    trained = [parameter for parameter in held if _is_trained(parameter, config)]
    num_owned = _share(trained, division) if config.distributed_optimizer else _count(trained)
    optimizer = num_owned * OPTIMIZER_BYTES[config.dtype]
    on_host = optimizer if config.offload_optimizer else 0
    num_dealt = _dealt(trained, division)
    past = config.snapshots_kept + (config.loss.reference_kl > 0)
    num_saved = num_owned if config.distributed_optimizer else num_dealt
    return RankMemory(
        stage=stage,
        weights=_count(held) * WEIGHT_BYTES[config.dtype],
        gradients=_count(trained) * GRADIENT_BYTES,
        optimizer=optimizer - on_host,
        activations=_activation_bytes(architecture, config, division, stage),
        logits=_logit_bytes(architecture, config) if stage == division.pipeline - 1 else 0,
        senders=num_senders * _sender_bytes(architecture, config),
        update=num_owned * UPDATE_BYTES + on_host,
        host_optimizer=on_host,
        # Snapshots are of the trained weights alone.
        host_snapshots=(past + 1 if past else 0) * num_dealt * WEIGHT_BYTES[config.dtype],
        host_undo=_undo_bytes(held, num_owned, config),
        host_checkpoint=_dealt(held, division) * WEIGHT_BYTES[config.dtype]
        + num_saved * OPTIMIZER_BYTES[config.dtype],
    )


def _undo_bytes(held: Iterable[HeldParameter], num_owned: int, config: LearnerConfig) -> int:
    """Bytes of the copy for undoing a step: the weights, Adam's moments and the values that they update, all three in fp32."""
    if config.num_minibatches * config.num_epochs == 1:
        return 0
    return _count(held) * WEIGHT_BYTES[config.dtype] + num_owned * 12


def _logit_bytes(architecture: Architecture, config: LearnerConfig) -> int:
    """Bytes of the logits if every position were trained, which is more than in any batch."""
    return head_bytes(architecture, config, num_rows=config.micro_batch_tokens)


def _sender_bytes(architecture: Architecture, config: LearnerConfig) -> int:
    """Bytes on the GPU of one sender. It holds one tensor at a time, and the embedding is the largest."""
    return SENDER_CONTEXT_BYTES + architecture.vocab_size * architecture.width * WEIGHT_BYTES[config.dtype]


def _is_trained(parameter: HeldParameter, config: LearnerConfig) -> bool:
    if config.lora.rank:
        return SUFFIX in parameter.name
    return not config.train_only or any(part in parameter.name for part in config.train_only)


def _share(held: Iterable[HeldParameter], division: Division) -> int:
    """Values in one process's share, if the processes that hold the same values divide them equally."""
    copies = {True: division.num_expert_copies, False: division.num_copies}
    return sum(-(-parameter.num_values // copies[parameter.is_expert]) for parameter in held)


def _dealt(held: Sequence[HeldParameter], division: Division) -> int:
    """The largest number of values that one process keeps, if the processes that hold the same values distribute whole parameters."""
    largest = max((parameter.num_values // parameter.num_layers for parameter in held), default=0)
    return max(_share(held, division), largest)


def _count(held: Iterable[HeldParameter]) -> int:
    return sum(parameter.num_values for parameter in held)


def _activation_bytes(
    architecture: Architecture, config: LearnerConfig, division: Division, stage: int
) -> int:
    """Bytes that all micro-batches in flight keep for the backward pass, and that one layer needs while its backward pass runs.

    A stage has begun one micro-batch for itself and one for each later stage. During its backward pass, a layer holds all of its
    activations, and gradients of about the same size; experts besides have a copy of their weights.
    """
    in_flight = division.pipeline - stage
    num_layers = architecture.num_layers // division.pipeline
    num_linear = len(architecture.delta_layers & {*range(stage * num_layers, (stage + 1) * num_layers)})
    kept, during = outer_bytes(architecture, config), 0.0
    for is_linear, count in ((False, num_layers - num_linear), (True, num_linear)):
        if count:
            saved, whole = (
                of_layer(architecture, config, is_linear=is_linear) for of_layer in (saved_bytes, layer_bytes)
            )
            again = rule_bytes(architecture, config) if is_linear else 0.0
            kept += count * saved
            during = max(during, (whole - saved) + whole + 2 * again)
    copied = grouped_bytes(architecture, config)
    return round(config.micro_batch_tokens * (in_flight * kept + during)) + copied
