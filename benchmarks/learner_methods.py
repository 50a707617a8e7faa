"""Three ways to take the same optimizer step: ours, megatron-core used as its own examples do, and plain transformers.

All minimise minus the advantage times the log-prob, summed over trained tokens and divided by their number, with AdamW and clipped
gradients. Bare Megatron gets our packed micro-batches and our attention, since its own rejects packing without TransformerEngine: padded
batches would be slower. transformers pads, samples of similar length together.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer import TransformerConfig
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.batching.batch import Batch, Sample, SampledReply, SampleTokens
from trainer.batching.packing import MicroBatch, pack
from trainer.learner import backend, hf
from trainer.learner.attention import PackedAttention
from trainer.learner.config import LearnerConfig, LossConfig, StepMetrics
from trainer.learner.devices import recognise
from trainer.learner.families.registry import read_architecture
from trainer.learner.forward import to_device
from trainer.learner.megatron import Learner

Step = Callable[["StepBatch"], "Taken"]
"""Takes one optimizer step on a batch."""

LR = 1e-4
WEIGHT_DECAY = 0.1
CLIP_GRAD = 1.0
TRAINED_SHARE = 1 / 3
SHORTEST_SHARE = 1 / 8  # of the longest sample


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Samples as arrays; positions are tokens that are fed."""

    step: int
    tokens: tuple[npt.NDArray[np.int32], ...]
    trained: tuple[npt.NDArray[np.bool_], ...]
    advantages: tuple[float, ...]

    @property
    def num_positions(self) -> int:
        return sum(len(one) - 1 for one in self.tokens)

    @property
    def num_trained(self) -> int:
        return int(sum(one.sum() for one in self.trained))


@dataclass(frozen=True, slots=True)
class Taken:
    """A step that was taken."""

    loss: float
    phases_s: float = 0.0  # in forward pass, backward pass and optimizer, where the method tells


def make_batch(num_samples: int, longest_tokens: int, vocab_size: int, *, step: int) -> StepBatch:
    """Random tokens; lengths evenly spread over the logarithm, and trained tokens in runs, as turns are."""
    rng = np.random.default_rng(step)
    logs = rng.uniform(math.log(longest_tokens * SHORTEST_SHARE), math.log(longest_tokens), num_samples)
    tokens = tuple(rng.integers(0, vocab_size, int(math.exp(log)), dtype=np.int32) for log in logs)
    trained = tuple(_runs(len(one)) for one in tokens)
    return StepBatch(step, tokens, trained, tuple(rng.normal(size=num_samples)))


def _runs(length: int, period: int = 24) -> npt.NDArray[np.bool_]:
    return (np.arange(length) % period) >= period * (1 - TRAINED_SHARE)


def timed(step: Step, batch: StepBatch) -> tuple[Taken, float]:
    """The step, and its seconds."""
    began = time.perf_counter()
    taken = step(batch)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return taken, time.perf_counter() - began


def write_model(directory: Path, shape: dict[str, Any]) -> None:
    """A random Qwen3."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", max_position_embeddings=4096, **shape)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)


@dataclass(frozen=True, slots=True)
class Device:
    """The device on which a learner of this process computes."""

    is_gpu: bool
    flops_per_s: float | None  # its peak in bf16; None where none is known

    def peak_bytes(self) -> int:
        """The most that tensors have taken since a `LearnerRun` began. Only for a GPU."""
        return torch.cuda.max_memory_allocated()


def this_device() -> Device:
    if not backend.has_cuda():
        return Device(is_gpu=False, flops_per_s=None)
    known = recognise(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory)
    return Device(is_gpu=True, flops_per_s=known.flops_per_s if known else None)


@dataclass(frozen=True, slots=True)
class Saved:
    """Seconds."""

    begin_s: float  # until the learner may go on
    whole_s: float  # until the checkpoint is on disk
    copy_s: float  # to copy the same tensors to memory that is there already


class LearnerRun:
    """Our learner, alone on its device."""

    def __init__(self, config: LearnerConfig, directory: Path, *, keep_tokens: bool = False) -> None:
        backend.join()
        self.config = config
        if backend.has_cuda():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self._learner = Learner(config, model_directory=directory, keep_tokens=keep_tokens)

    def step(self, batch: StepBatch) -> Taken:
        metrics = self._learner.step(batch_of(batch))
        assert isinstance(metrics, StepMetrics), metrics
        return Taken(metrics.loss, metrics.forward_s + metrics.backward_s + metrics.optimizer_s)

    def take_tokens(self) -> tuple[SampleTokens, ...]:
        """What the last step did with each token, if it is kept."""
        return self._learner.take_tokens()

    def export(self, directory: Path) -> None:
        self.write("export", directory)

    def write(self, export: str, directory: Path) -> None:
        """Call the learner's method of this name, which writes what a version consists of."""
        getattr(self._learner, export)(directory)

    def save(self, directory: Path) -> "Saved":
        """Write a checkpoint, then copy what it wrote once more."""
        began = time.perf_counter()
        self._learner.begin_save(directory, b"")
        begun = time.perf_counter()
        saving = self._learner._saving
        assert saving is not None
        sources = [tensor.to(backend.device(), copy=True) for tensor in saving._copies.tensors]
        targets = [torch.zeros_like(source, device="cpu") for source in sources]
        before = time.perf_counter()
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
        copied = time.perf_counter()
        self._learner.finish_save()
        return Saved(begun - began, time.perf_counter() - began - (copied - begun), copied - before)

    def close(self) -> None:
        """Free the model for the next run of this process."""
        del self._learner
        gc.collect()


def ours(directory: Path, *, longest_tokens: int) -> Step:
    return LearnerRun(config(longest_tokens=longest_tokens), directory).step


def config(*, longest_tokens: int) -> LearnerConfig:
    """The configuration of our learner."""
    return LearnerConfig(
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        clip_grad=CLIP_GRAD,
        micro_batch_tokens=longest_tokens,
        dtype="bf16" if backend.has_cuda() else "fp32",
        loss=LossConfig(kind="reinforce"),
    )


def batch_of(batch: StepBatch) -> Batch:
    """The batch as our learner takes it."""
    return Batch(
        step=batch.step,
        samples=_samples(batch),
        temperature=1.0,
        num_trajectories=len(batch.tokens),
        request_ids=tuple(str(index) for index in range(len(batch.tokens))),
        lag_max=0,
        lag_mean=0.0,
    )


def _samples(batch: StepBatch) -> tuple[Any, ...]:
    return tuple(
        Sample(
            request_id=str(index),
            group_id="0",
            branch=0,
            tokens_T=tokens,
            trained_T=trained,
            behaviour_logprobs_T=np.where(trained, -9.0, 0).astype(np.float32),
            advantages_T=np.where(trained, advantage, 0).astype(np.float32),
            versions_T=np.where(trained, 0, -1).astype(np.int32),
            replies=_replies(trained),
        )
        for index, (tokens, trained, advantage) in enumerate(
            zip(batch.tokens, batch.trained, batch.advantages, strict=True)
        )
    )


def _replies(trained: npt.NDArray[np.bool_]) -> tuple[SampledReply, ...]:
    """Each unbroken run of trained tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], trained, [False]]).astype(np.int8))).tolist()
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return tuple(SampledReply(turn, start, end, digest=b"") for turn, (start, end) in enumerate(pairs))


def bare_megatron(directory: Path, *, longest_tokens: int) -> Step:
    """GPTModel, DistributedDataParallel, Megatron's optimizer and its schedule, as in megatron-core's quick start."""
    backend.join()
    backend.lay_out(tensor_parallel=1, pipeline_parallel=1)
    with backend.device_scope():
        model = _gpt_model(directory)
        options = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        wrapped = DistributedDataParallel(model.config, options, model)
        adam = OptimizerConfig(
            optimizer="adam",
            lr=LR,
            adam_beta2=0.95,
            weight_decay=WEIGHT_DECAY,
            clip_grad=CLIP_GRAD,
            bf16=model.config.bf16,
            params_dtype=model.config.params_dtype,
        )
        optimizer = get_megatron_optimizer(adam, [wrapped])
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.grad_scale_func = optimizer.scale_loss
    for group in optimizer.param_groups:
        group["weight_decay"] = WEIGHT_DECAY * group["wd_mult"]

    def step(batch: StepBatch) -> Taken:
        with backend.device_scope():
            wrapped.zero_grad_buffer()
            optimizer.zero_grad()
            loss = _megatron_gradient(wrapped, batch, longest_tokens)
            optimizer.step()
        return Taken(loss / batch.num_trained)

    return step


def _gpt_model(directory: Path) -> Any:
    shape = read_architecture(directory)
    dtype = torch.bfloat16 if backend.has_cuda() else torch.float32
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.width,
        ffn_hidden_size=shape.mlp_width,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_key_value_heads,
        kv_channels=shape.head_width,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=True,
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    cast(Any, spec.submodules).self_attention.submodules.core_attention = PackedAttention
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_positions,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=cast(int, shape.rope_theta),
    )
    model = model.to(dtype).to(backend.device())
    hf.read_weights(model, shape, directory)
    return model


def _megatron_gradient(wrapped: Any, batch: StepBatch, longest_tokens: int) -> float:
    """Forward and backward passes over all micro-batches; the summed loss."""

    def loss_of(microbatch: MicroBatch, logits_1PV: Any) -> tuple[Any, Any, float]:
        advantages_P, trained_P = to_device(microbatch.advantages_P), to_device(microbatch.trained_P)
        losses_P = vocab_parallel_cross_entropy(
            logits_1PV.transpose(0, 1).float(), to_device(microbatch.targets_P)[:, None]
        )[:, 0]
        loss = (losses_P * advantages_P * trained_P).sum()
        return loss, trained_P.sum().int(), loss.item()

    def forward(source: Iterator[MicroBatch], model: Any) -> tuple[Any, Callable[..., Any]]:
        microbatch = next(source)
        boundaries = to_device(microbatch.boundaries)
        packing = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            max_seqlen_q=microbatch.longest,
            max_seqlen_kv=microbatch.longest,
        )
        inputs, positions = to_device(microbatch.inputs_P)[None], to_device(microbatch.positions_P)[None]
        logits_1PV = model(inputs, positions, None, packed_seq_params=packing)
        return logits_1PV, partial(loss_of, microbatch)

    microbatches = pack(_samples(batch), max_tokens=longest_tokens)
    return sum(
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(microbatches),
            model=[wrapped],
            num_microbatches=len(microbatches),
            seq_length=longest_tokens,
            micro_batch_size=1,
            forward_only=False,
        )
    )


def plain_transformers(directory: Path, *, longest_tokens: int) -> Step:
    """AutoModelForCausalLM and torch's AdamW, as a trainer on transformers does: padded, logits of all positions."""
    has_cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if has_cuda else ("cpu", torch.float32)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    model.to(device)
    matrices = [one for one in model.parameters() if one.dim() > 1]
    vectors = [one for one in model.parameters() if one.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=LR,
        betas=(0.9, 0.95),
    )

    def step(batch: StepBatch) -> Taken:
        optimizer.zero_grad()
        total = 0.0
        for padded in _padded(batch, longest_tokens):
            tokens, mask, weights = (torch.from_numpy(one).to(device) for one in padded)
            logits = model(tokens[:, :-1], attention_mask=mask[:, :-1]).logits.float()
            losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
            loss = (losses * weights[:, 1:].flatten()).sum()
            (loss / batch.num_trained).backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
        optimizer.step()
        return Taken(total / batch.num_trained)

    return step


def _padded(batch: StepBatch, longest_tokens: int) -> Iterator[tuple[npt.NDArray[Any], ...]]:
    """Tokens, attention mask and advantages (0 where not trained) of micro-batches, the longest samples first."""
    order = sorted(range(len(batch.tokens)), key=lambda index: -len(batch.tokens[index]))
    while order:
        width = len(batch.tokens[order[0]])
        chosen, order = _split(order, max(1, longest_tokens // width))
        shape = (len(chosen), width)
        tokens, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        weights = np.zeros(shape, np.float32)
        for row, index in enumerate(chosen):
            length = len(batch.tokens[index])
            tokens[row, :length], mask[row, :length] = batch.tokens[index], 1
            weights[row, :length] = batch.trained[index] * batch.advantages[index]
        yield tokens, mask, weights


def _split(order: Sequence[int], count: int) -> tuple[list[int], list[int]]:
    return list(order[:count]), list(order[count:])
