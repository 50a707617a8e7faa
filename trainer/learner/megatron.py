"""The learner: batches in, updated weights out, on Megatron at any number of processes.

Every rank builds one and calls the same methods with the same arguments in the same order: all of them are collective.
The same code runs on one CPU process and on many GPUs; only `backend` knows the difference.
"""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from torch import distributed

from trainer.batching.batch import Batch, Sample
from trainer.learner import backend, checkpoint, directories, hf
from trainer.learner.architecture import read_architecture
from trainer.learner.config import LearnerConfig, NotFinite, StepMetrics
from trainer.learner.forward import Forward, Logprobs
from trainer.learner.loss import ineffective_fields
from trainer.learner.minibatches import minibatches
from trainer.learner.model import build_model
from trainer.learner.optimizer import Undo, adam_steps, build_optimizer, set_hyperparameters
from trainer.learner.snapshots import Snapshots, copy_weights, weights_replaced
from trainer.learner.update import Report, Updater, step_metrics

log = logging.getLogger("swerve.learner")


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
            _freeze(self._model, config.train_only)
            self._wrapped = _wrap(self._model, config)
            self._optimizer = build_optimizer(self._wrapped, config)
        self._model.config.finalize_model_grads_func = finalize_model_grads
        self._model.config.grad_scale_func = self._optimizer.scale_loss
        self._forward = Forward(
            self._wrapped, max_tokens=config.micro_batch_tokens, vocab_size=self._architecture.vocab_size
        )
        self._updater = Updater(self._forward, self._wrapped, self._optimizer, config.loss)
        self._snapshots = Snapshots(self._model, kept=config.snapshots_kept)
        self._starting = copy_weights(self._model) if config.loss.reference_kl else None
        if distributed.get_rank() == 0:
            for name in ineffective_fields(config.loss):
                log.warning("learner.loss.%s has no effect on kind = %r", name, config.loss.kind)

    @property
    def versions_held(self) -> tuple[int, ...]:
        """Weight versions that `logprobs_under` can compute under, oldest first."""
        return self._snapshots.versions

    def step(self, batch: Batch) -> StepMetrics | NotFinite:
        """Learn from one batch: `num_epochs` passes of `num_minibatches` updates each.

        If the loss or gradient of an update is not finite, the whole batch is skipped: weights, optimizer state and `steps`
        are then what they were before. Several updates cost a host copy of weights and optimizer state for that.
        """
        assert batch.num_trained_tokens, "a batch without trained tokens cannot be learned from"
        started = time.perf_counter()
        lr = self.config.lr_at(self.steps + 1)
        set_hyperparameters(self._optimizer, self.config, lr=lr)
        reference = self._reference_logprobs(batch)
        parts = list(minibatches(batch, self.config))
        undo = Undo(self._model, self._optimizer) if len(parts) > 1 else None
        reports: list[Report] = []
        for chosen in parts:
            report = self._updater.update(
                [batch.samples[index] for index in chosen],
                None if reference is None else [reference[index] for index in chosen],
                batch.temperature,
            )
            if isinstance(report, NotFinite):
                if undo is not None:
                    undo()
                return report
            reports.append(report)
        self.steps += 1
        return step_metrics(batch, lr, reports, train_s=time.perf_counter() - started)

    def logprobs(self, samples: Sequence[Sample], temperature: float) -> Logprobs:
        """Log-probs of every token of each sample under the present weights, on every rank."""
        return self._forward.logprobs(samples, temperature)

    def snapshot(self, version: int) -> None:
        """Keep a host copy of the present weights; the oldest beyond `snapshots_kept` are dropped."""
        self._snapshots.take(version)

    def logprobs_under(self, version: int, samples: Sequence[Sample], temperature: float) -> Logprobs:
        """As `logprobs`, under a snapshot. Raises KeyError for a version that is no longer held."""
        with self._snapshots.restored(version):
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
        return adam_steps(self._optimizer)

    def _reference_logprobs(self, batch: Batch) -> Logprobs | None:
        if self._starting is None:
            return None
        with weights_replaced(self._model, self._starting):
            return self.logprobs(batch.samples, batch.temperature)


def _freeze(model: GPTModel, train_only: tuple[str, ...]) -> None:
    """Train the parameters whose names hold one of `train_only`; all if it is empty."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not train_only or any(part in name for part in train_only))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"learner.train_only = {list(train_only)} matches no parameter: '.mlp.' would match every MLP"
        )


def _wrap(model: GPTModel, config: LearnerConfig) -> DistributedDataParallel:
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=config.distributed_optimizer
    )
    return DistributedDataParallel(model.config, options, model)
