"""The learner: batches in, better weights out, on Megatron at any number of processes.

Every rank builds one and calls the same methods with the same arguments in the same order: all of them are
collective. The same code runs on one CPU process and on many GPUs; only `backend` knows the difference.

Gradients are summed over all micro-batches of an update and divided once, by the update's trained tokens on
all ranks.
"""

import contextlib
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, distributed

from trainer.batching.batch import Batch, Sample
from trainer.batching.packing import MicroBatch, deal, pack, unpack
from trainer.learner import backend, checkpoint, directories, hf
from trainer.learner.architecture import read_architecture
from trainer.learner.config import LearnerConfig, StepMetrics
from trainer.learner.logprobs import vocab_parallel_logprobs
from trainer.learner.loss import Tokens, find_condemned, policy_loss
from trainer.learner.model import build_model

Logprobs = list[npt.NDArray[np.float32]]
LossFunction = Callable[[Tensor], tuple[Tensor, Tensor, Any]]

SUMS = (
    "loss",
    "tokens",
    "entropy",
    "ratio",
    "weight",
    "weight_squared",
    "masked",
    "vetoed",
    "behaviour_kl",
    "reference_kl",
)
"""What `policy_loss` reports as sums over tokens."""


class Learner:
    """A policy under training. Needs `backend.join` first; one in each process of the run."""

    def __init__(self, config: LearnerConfig, *, model_directory: Path) -> None:
        """Read the starting weights (Hugging Face). Raises ValueError where model and layout do not fit."""
        backend.lay_out(tensor_parallel=config.tensor_parallel, pipeline_parallel=config.pipeline_parallel)
        self.config = config
        self.steps = 0  # taken so far; restored with a checkpoint
        self._model_directory = model_directory
        self._architecture = read_architecture(model_directory)
        with backend.device_scope():
            self._model = build_model(self._architecture, config)
            hf.read_weights(self._model, model_directory)
            self._model.to(backend.device())
            self._freeze()
            self._wrapped = self._wrap()
            self._optimizer = self._build_optimizer()
        self._model.config.finalize_model_grads_func = finalize_model_grads
        self._model.config.grad_scale_func = self._optimizer.scale_loss
        self._snapshots: dict[int, dict[str, Tensor]] = {}
        self._starting = self._copy_weights() if config.loss.reference_kl else None

    @property
    def versions_held(self) -> tuple[int, ...]:
        """Weight versions that `logprobs_under` can still answer for, oldest first."""
        return tuple(self._snapshots)

    def step(self, batch: Batch) -> StepMetrics:
        """Learn from one batch: `num_epochs` passes of `num_minibatches` updates each.

        Raises FloatingPointError before an update whose loss or gradient is not finite: the weights stay as
        they were.
        """
        assert batch.num_trained_tokens, "a batch without trained tokens cannot be learned from"
        started = time.perf_counter()
        lr = self.config.lr_at(self.steps + 1)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        reference = self._reference_logprobs(batch)
        reports = [
            self._update(
                [batch.samples[i] for i in chosen], [reference[i] for i in chosen], batch.temperature
            )
            for chosen in minibatches(batch, self.config)
        ]
        self.steps += 1
        return _metrics(batch, lr, reports, train_s=time.perf_counter() - started)

    def logprobs(self, samples: Sequence[Sample], temperature: float) -> Logprobs:
        """Log-probs in nats of every token of each sample under the present weights, on every rank.

        One float32 array per sample, aligned with its tokens; the first token, predicted from nothing, has 0.
        """
        if not samples:
            return []
        mine = self._share(samples)
        values = self._run(
            mine, functools.partial(self._prepare_logprobs, temperature=temperature), train=False
        )
        flat = torch.zeros(sum(sample.num_tokens for sample in samples), device=backend.device())
        if self._reports:
            flat.copy_(
                torch.from_numpy(np.concatenate(unpack(mine, [v.cpu().numpy() for v in values], samples)))
            )
        distributed.all_reduce(flat)
        ends = np.cumsum([sample.num_tokens for sample in samples])[:-1]
        return np.split(flat.cpu().numpy(), ends)

    def snapshot(self, version: int) -> None:
        """Keep a host copy of the present weights; the oldest beyond `snapshots_kept` are dropped."""
        self._snapshots[version] = self._copy_weights()
        for stale in list(self._snapshots)[: -self.config.snapshots_kept or None]:
            del self._snapshots[stale]

    def logprobs_under(self, version: int, samples: Sequence[Sample], temperature: float) -> Logprobs:
        """As `logprobs`, under a snapshot. Raises KeyError for a version that is no longer held."""
        with self._weights_of(self._snapshots[version]):
            return self.logprobs(samples, temperature)

    def export(self, directory: Path) -> None:
        """Write a Hugging Face directory, config and tokenizer from the starting model. Whole or absent."""
        with backend.device_scope():
            weights = hf.gather_weights(self._model, vocab_size=self._architecture.vocab_size)
        if distributed.get_rank() == 0:
            hf.write_directory(weights, directory, source=self._model_directory)
        distributed.barrier()

    def save(self, directory: Path, extra: bytes) -> None:
        """Write a checkpoint that continues exactly from here, the caller's own state in `extra` included.

        Whole or absent. The directory lies on a filesystem that all ranks share.
        """
        partial = directories.partial_of(directory)
        if distributed.get_rank() == 0:
            directories.begin(directory)
        distributed.barrier()
        with backend.device_scope():
            checkpoint.write_checkpoint(partial, self._model, self._optimizer, steps=self.steps, extra=extra)
        if distributed.get_rank() == 0:
            directories.commit(directory)
        distributed.barrier()

    def restore(self, directory: Path) -> bytes:
        """Go on from a checkpoint, of whatever parallel layout; returns the `extra` it was saved with."""
        with backend.device_scope():
            self.steps, extra = checkpoint.read_checkpoint(directory, self._model, self._optimizer)
        return extra

    def adam_steps(self) -> list[float]:
        """How often each parameter of this rank has been updated, by the optimizer's own count."""
        return checkpoint.adam_steps(self._optimizer)

    @property
    def _reports(self) -> bool:
        """Whether this rank's copy of a result counts: all tensor-parallel ranks compute the same."""
        return (
            parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
        )

    def _freeze(self) -> None:
        wanted = self.config.train_only
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad_(not wanted or any(part in name for part in wanted))
        if not any(parameter.requires_grad for parameter in self._model.parameters()):
            raise ValueError(
                f"learner.train_only = {list(wanted)} matches no parameter: '.mlp.' would match every MLP"
            )

    def _wrap(self) -> DistributedDataParallel:
        options = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=self.config.distributed_optimizer
        )
        return DistributedDataParallel(self._model.config, options, self._model)

    def _build_optimizer(self) -> MegatronOptimizer:
        options = OptimizerConfig(
            optimizer="adam",
            lr=self.config.lr,
            adam_beta1=self.config.betas[0],
            adam_beta2=self.config.betas[1],
            adam_eps=self.config.eps,
            weight_decay=self.config.weight_decay,
            clip_grad=self.config.clip_grad,
            bf16=self.config.dtype == "bf16",
            params_dtype=self._model.config.params_dtype,
            use_distributed_optimizer=self.config.distributed_optimizer,
        )
        return get_megatron_optimizer(options, [self._wrapped])

    def _share(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        microbatches = pack(samples, max_tokens=self.config.micro_batch_tokens)
        hands = deal(microbatches, num_ranks=parallel_state.get_data_parallel_world_size())
        return hands[parallel_state.get_data_parallel_rank()]

    def _update(self, samples: Sequence[Sample], reference: Logprobs, temperature: float) -> dict[str, float]:
        mine = self._share(samples)
        condemned = self._condemned(samples, temperature)
        with backend.device_scope():
            self._wrapped.zero_grad_buffer()
            self._optimizer.zero_grad()
        prepare = functools.partial(
            self._prepare_loss, reference=reference, condemned=condemned, temperature=temperature
        )
        report = self._reduce(self._run(mine, prepare, train=True))
        if report.pop("broken"):
            raise FloatingPointError(
                "the loss or its gradient is not finite: the weights were left as they were"
            )
        with backend.device_scope():
            _, report["grad_norm"], _ = self._optimizer.step()
        return report | {"microbatches": len(mine)}

    def _run(
        self, microbatches: list[MicroBatch], prepare: Callable[[MicroBatch], LossFunction], *, train: bool
    ) -> list[Any]:
        """Drive Megatron's schedule; on the last pipeline stage, the report of each micro-batch."""

        def forward(source: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, LossFunction]:
            microbatch = next(source)
            inputs, positions = _tensor(microbatch.inputs_P)[None], _tensor(microbatch.positions_P)[None]
            logits_1PV = model(inputs, positions, None, packed_seq_params=_packing(microbatch))
            return logits_1PV, prepare(microbatch)

        with backend.device_scope(), contextlib.nullcontext() if train else torch.no_grad():
            return get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(microbatches),
                model=[self._wrapped],
                num_microbatches=len(microbatches),
                seq_length=self.config.micro_batch_tokens,
                micro_batch_size=1,
                forward_only=not train,
            )

    def _prepare_loss(
        self,
        microbatch: MicroBatch,
        *,
        reference: Logprobs,
        condemned: Sequence[bool],
        temperature: float,
    ) -> LossFunction:
        def loss(logits_1PV: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            logprobs_P, entropies_P = self._logprobs_of(logits_1PV, microbatch, temperature)
            tokens = Tokens(
                policy_logprobs_P=logprobs_P,
                behaviour_logprobs_P=_tensor(microbatch.behaviour_logprobs_P),
                advantages_P=_tensor(microbatch.advantages_P),
                trained_P=_tensor(microbatch.trained_P),
                segments_P=_tensor(microbatch.segments_P),
                condemned_P=_tensor(_condemned_of(microbatch, condemned)),
                entropies_P=entropies_P,
                reference_logprobs_P=self._reference_of(microbatch, reference),
            )
            total, sums = policy_loss(tokens, self.config.loss)
            return total, sums["tokens"].to(torch.int), sums

        return loss

    def _prepare_logprobs(self, microbatch: MicroBatch, *, temperature: float) -> LossFunction:
        def report(logits_1PV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logprobs_P, _ = self._logprobs_of(logits_1PV, microbatch, temperature)
            return logprobs_P.sum(), torch.zeros((), dtype=torch.int, device=logits_1PV.device), logprobs_P

        return report

    def _logprobs_of(
        self, logits_1PV: Tensor, microbatch: MicroBatch, temperature: float
    ) -> tuple[Tensor, Tensor]:
        return vocab_parallel_logprobs(
            logits_1PV[0],
            _tensor(microbatch.targets_P),
            temperature=temperature,
            vocab_size=self._architecture.vocab_size,
            group=parallel_state.get_tensor_model_parallel_group(),
        )

    def _condemned(self, samples: Sequence[Sample], temperature: float) -> list[bool]:
        """Which samples are not trained because of another one of their trajectory. Costs a forward pass over
        the trajectories that have several samples, and nothing where there is none.
        """
        branched = branched_samples(samples)
        if self.config.loss.kind != "stream_grpo" or not branched:
            return [False] * len(samples)
        chosen = [samples[index] for index in branched]
        verdicts = find_condemned(chosen, self.logprobs(chosen, temperature), self.config.loss)
        found = dict(zip(branched, verdicts, strict=True))
        return [found.get(index, False) for index in range(len(samples))]

    def _reference_of(self, microbatch: MicroBatch, reference: Logprobs) -> Tensor | None:
        if self._starting is None:
            return None
        values = [reference[index][1:] for index in microbatch.samples]
        return _tensor(np.concatenate(values) if values else np.zeros(microbatch.num_positions, np.float32))

    def _reference_logprobs(self, batch: Batch) -> Logprobs:
        if self._starting is None:
            return [np.zeros(0, np.float32)] * len(batch.samples)
        with self._weights_of(self._starting):
            return self.logprobs(batch.samples, batch.temperature)

    def _reduce(self, reports: list[dict[str, Tensor]]) -> dict[str, float]:
        """Sums (and the maximum) over micro-batches and ranks; `broken` counts what is not finite."""
        sums = torch.zeros(len(SUMS) + 1, dtype=torch.float64, device=backend.device())
        peak = torch.zeros((), dtype=torch.float64, device=backend.device())
        if self._reports:
            for report in reports:
                sums[:-1] += torch.stack([report[name].double() for name in SUMS])
                peak = torch.maximum(peak, report["ratio_max"].double())
        sums[-1] = sum(int(not buffer.grad_data.sum().isfinite()) for buffer in self._wrapped.buffers)
        distributed.all_reduce(sums)
        distributed.all_reduce(peak, op=distributed.ReduceOp.MAX)
        reduced = dict(zip((*SUMS, "broken"), sums.tolist(), strict=True)) | {"ratio_max": peak.item()}
        reduced["broken"] += not math.isfinite(reduced["loss"])
        return reduced

    def _copy_weights(self) -> dict[str, Tensor]:
        return {name: p.detach().to("cpu", copy=True) for name, p in self._model.named_parameters()}

    @contextlib.contextmanager
    def _weights_of(self, weights: dict[str, Tensor]) -> Iterator[None]:
        """Compute under other weights for a while; the present ones come back bit for bit."""
        present = self._copy_weights()
        self._load_weights(weights)
        try:
            yield
        finally:
            self._load_weights(present)

    @torch.no_grad()
    def _load_weights(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self._model.named_parameters():
            parameter.copy_(weights[name])


def minibatches(batch: Batch, config: LearnerConfig) -> Iterator[list[int]]:
    """Indices of the samples of each update: every epoch a new division, alike on all ranks and reruns.

    Depends on which samples there are, not on their order; a trajectory is never divided. A part with nothing to
    train is passed over.
    """
    trained = [index for index, sample in enumerate(batch.samples) if sample.num_trained_tokens]
    trained.sort(key=lambda index: (batch.samples[index].request_id, batch.samples[index].branch))
    trajectories: dict[str, list[int]] = {}
    for index in trained:
        trajectories.setdefault(batch.samples[index].request_id, []).append(index)
    whole = list(trajectories.values())
    for epoch in range(config.num_epochs):
        shuffled = np.random.default_rng((config.seed, batch.step, epoch)).permutation(len(whole))
        for part in np.array_split(shuffled, config.num_minibatches):
            if len(part):
                yield [index for place in part for index in whole[place]]


def branched_samples(samples: Sequence[Sample]) -> list[int]:
    """Indices of those that are not their trajectory's only one."""
    counts = Counter(sample.request_id for sample in samples)
    return [index for index, sample in enumerate(samples) if counts[sample.request_id] > 1]


def _metrics(batch: Batch, lr: float, reports: list[dict[str, float]], *, train_s: float) -> StepMetrics:
    total = {name: sum(report[name] for report in reports) for name in (*SUMS, "microbatches", "grad_norm")}
    tokens = total["tokens"]
    return StepMetrics(
        step=batch.step,
        loss=total["loss"] / tokens,
        grad_norm=total["grad_norm"] / len(reports),
        lr=lr,
        num_trained_tokens=batch.num_trained_tokens,
        num_microbatches=int(total["microbatches"]),
        num_updates=len(reports),
        entropy=total["entropy"] / tokens,
        ratio_mean=total["ratio"] / tokens,
        ratio_max=max(report["ratio_max"] for report in reports),
        ess_share=total["weight"] ** 2 / (tokens * total["weight_squared"]),
        masked_share=total["masked"] / tokens,
        vetoed_share=total["vetoed"] / tokens,
        behaviour_kl=total["behaviour_kl"] / tokens,
        reference_kl=total["reference_kl"] / tokens,
        train_s=train_s,
    )


def _condemned_of(microbatch: MicroBatch, condemned: Sequence[bool]) -> npt.NDArray[np.bool_]:
    verdicts_S = np.array([condemned[index] for index in microbatch.samples] or [False])
    return verdicts_S[microbatch.segments_P]


def _tensor(array: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(array).to(backend.device())


def _packing(microbatch: MicroBatch) -> PackedSeqParams:
    boundaries = _tensor(microbatch.boundaries)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=microbatch.longest,
        max_seqlen_kv=microbatch.longest,
    )
