"""The learner: batches in, updated weights out, on Megatron at any number of processes.

Every rank builds one and calls the same methods with the same arguments in the same order: all of them are collective.
The same code runs on one CPU process and on many GPUs; only `backend` knows the difference.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from torch import Tensor, distributed

from pipeline.journal.rows import RankUse
from trainer.batching.batch import Batch, Sample, SampleTokens
from trainer.learner import backend, checkpoint, directories, hf, lora
from trainer.learner.architecture import Architecture
from trainer.learner.attention import Positions, Rotary
from trainer.learner.config import LearnerConfig, NotFinite, StepMetrics
from trainer.learner.export import Exporter, carried_parts, copy_description, weight_parts
from trainer.learner.families.registry import read_architecture
from trainer.learner.forward import Forward, Likelihoods, Logprobs
from trainer.learner.fp8 import packed_names, packed_parts
from trainer.learner.gpu_use import GpuUse
from trainer.learner.logprobs import Head
from trainer.learner.lora import ADAPTER_DIRECTORY, gather_adapters, write_adapters
from trainer.learner.model import build_model, weights_dtype
from trainer.learner.objectives.registry import ineffective_fields, resolve
from trainer.learner.optimizer import Undo, adam_steps, build_optimizer, check_adam, set_hyperparameters
from trainer.learner.phases import Phases, StepWork
from trainer.learner.routing import Routing
from trainer.learner.snapshots import DividedCopy, Snapshots
from trainer.learner.update import LossInputs, Report, Updater, minibatches, step_metrics

log = logging.getLogger("swerve.learner")


class Learner:
    """A policy under training. Needs `backend.join` first; one in each process of the run."""

    def __init__(
        self,
        config: LearnerConfig,
        *,
        model_directory: Path,
        packs_exports: bool = False,
        keep_tokens: bool = False,
    ) -> None:
        """Read the starting weights (Hugging Face). With `packs_exports`, `export` writes in FP8 what these have in FP8. With
        `keep_tokens`, each step leaves what `take_tokens` returns. Raises ValueError where model and layout do not fit, and where
        TransformerEngine or Apex is installed.
        """
        check_adam()
        _lay_out(config)
        self.config = config
        self._loss = resolve(config.loss)
        self.steps = 0  # number of steps taken; restored with a checkpoint
        self._source = model_directory
        self._architecture = read_architecture(model_directory)
        with backend.device_scope():
            self._model = build_model(self._architecture, config)
            with backend.together():
                hf.read_weights(self._model, self._architecture, model_directory)
            if config.lora.rank:
                lora.attach(self._model, config.lora)
            self._model.to(backend.device())
            _freeze(self._model, (lora.SUFFIX,) if config.lora.rank else config.train_only)
            self._wrapped = _wrap(self._model, config)
            self._optimizer = build_optimizer(self._wrapped, config)
        self.gpu_use = GpuUse.of_this_device()
        self._phases = Phases()
        self._model.config.timers = self._phases
        self._model.config.grad_scale_func = self._optimizer.scale_loss
        self._forward = _forward(self._wrapped, self._model, self._architecture, config)
        self._updater = Updater(
            self._forward,
            self._wrapped,
            self._optimizer,
            self._loss,
            self._phases,
            keep_tokens=keep_tokens,
        )
        self._tokens: dict[tuple[str, int], SampleTokens] = {}  # of the last step, by request and branch
        self._is_packed = packs_exports
        self._exporter = self._make_exporter()
        self._adapters: dict[str, Tensor] = {}  # adapters of the current export, on rank 0
        self._streamed: StepWork | None = None  # a step whose samples are accumulated part by part
        self._saving: checkpoint.Saving | None = None
        self._snapshots = Snapshots(self._model, kept=config.snapshots_kept)
        self._starting = DividedCopy(self._model) if config.loss.reference_kl else None
        if distributed.get_rank() == 0:
            for name in ineffective_fields(self._loss):
                log.warning("learner.loss.%s has no effect on kind = %r", name, config.loss.kind)

    @property
    def versions_held(self) -> tuple[int, ...]:
        """Weight versions that `logprobs_under` can compute under, oldest first."""
        return self._snapshots.versions

    def take_gpu_use(self) -> tuple[RankUse, ...]:
        """How busy the GPUs of all ranks were since the last call."""
        return self.gpu_use.gathered()

    def step(self, batch: Batch) -> StepMetrics | NotFinite:
        """Learn from one batch: `num_epochs` passes of `num_minibatches` updates each.

        If the loss or gradient of an update is not finite, the whole batch is skipped: weights, optimizer state and `steps`
        are then what they were before. Several updates cost a host copy of weights and optimizer state for that.
        """
        assert batch.num_trained_tokens, "a batch without trained tokens cannot be learned from"
        work = self._begin()
        work.add(batch, num_passes=self.config.num_epochs)
        parts = list(minibatches(batch, self.config))
        inputs = self._loss_inputs(batch, num_updates=len(parts))
        undo = Undo(self._model, self._optimizer) if len(parts) > 1 else None
        reports: list[Report] = []
        for chosen in parts:
            self._updater.begin()
            self._updater.accumulate([batch.samples[index] for index in chosen], inputs.chosen(chosen))
            self._snapshots.weights_change()
            report = self._updater.apply()
            if isinstance(report, NotFinite):
                if undo is not None:
                    undo()
                return report
            reports.append(report)
        return self._metrics(batch.step, work, reports)

    def accumulate(self, batch: Batch) -> None:
        """Add the gradient of a part of the next step's samples, all of a trajectory's in one part; `apply` takes the step."""
        if self._streamed is None:
            self._streamed = self._begin()
            self._updater.begin()
        with self._streamed.resumed():
            self._streamed.add(batch, num_passes=1)
            self._updater.accumulate(batch.samples, self._loss_inputs(batch, num_updates=1))

    def apply(self, step: int) -> StepMetrics | NotFinite:
        """One update with the gradient of all that was accumulated, as if it had been one batch. Skipped as by `step`."""
        assert self._streamed is not None, "something was accumulated"
        work, self._streamed = self._streamed, None
        self._snapshots.weights_change()
        with work.resumed():
            report = self._updater.apply()
        return report if isinstance(report, NotFinite) else self._metrics(step, work, [report])

    def take_tokens(self) -> tuple[SampleTokens, ...]:
        """The data of the last step about each token, returned once; for a token with several passes, the last one. Not collective."""
        taken, self._tokens = self._tokens, {}
        return tuple(taken.values())

    def logprobs(self, samples: Sequence[Sample], temperature: float) -> Logprobs:
        """Log-probs of the trained tokens of each sample under the present weights, on every rank."""
        return self._forward.logprobs(samples, temperature)

    def likelihoods(self, samples: Sequence[Sample]) -> Likelihoods:
        """Log-probs at temperature 1 of the trained tokens of each sample, and which of them greedy decoding gives, on every rank."""
        return self._forward.likelihoods(samples)

    def snapshot(self, version: int) -> None:
        """Keep a host copy of the present weights; the oldest beyond `snapshots_kept` are dropped."""
        self._snapshots.take(version)

    def logprobs_under(self, version: int, samples: Sequence[Sample], temperature: float) -> Logprobs:
        """Log-probs as by `logprobs`, under a snapshot. Raises KeyError for a version that is no longer held."""
        with self._snapshots.restored(version):
            return self.logprobs(samples, temperature)

    def export(self, directory: Path) -> None:
        """Write a Hugging Face directory, config and tokenizer from the starting model. The directory appears complete or not at all.

        Adapters are merged into the weights, and also written by themselves into the folder `adapter`. The directory is on a file system
        that all ranks share.
        """
        if self.config.lora.rank:
            self._adapters = gather_adapters(self._model, self._architecture)
        self._exporter.write(directory)

    def export_base(self, directory: Path) -> None:
        """Write what `export` writes, as it is without adapters: the weights that they belong to, which no step changes."""
        exporter = Exporter(
            [
                *weight_parts(self._model, self._architecture, merges=False),
                *carried_parts(self._architecture, self._source),
            ],
            describe=lambda partial: copy_description(self._source, partial, weights_dtype(self.config)),
        )
        exporter.write(directory)

    def export_adapters(self, directory: Path) -> None:
        """Write the adapters alone, in PEFT's format. Collective; an OSError of rank 0 is raised on all ranks."""
        tensors, failure = gather_adapters(self._model, self._architecture), None
        if distributed.get_rank() == 0:
            try:
                with directories.writing(directory.parent):
                    write_adapters(tensors, directory, self.config.lora, source=self._source)
            except OSError as error:
                failure = error
        backend.agree(failure)

    def save(self, directory: Path, extra: bytes) -> None:
        """Write a checkpoint that continues exactly from here, the caller's own state in `extra` included.

        The checkpoint appears complete or not at all, on a file system that all ranks share.
        """
        self.begin_save(directory, extra)
        self.finish_save()

    def begin_save(self, directory: Path, extra: bytes) -> None:
        """Begins a save. On return the content is fixed, and a thread of each rank writes it while steps continue."""
        assert self._saving is None, "one checkpoint at a time"
        with backend.device_scope():
            self._saving = checkpoint.begin_checkpoint(
                directory, self._model, self._optimizer, steps=self.steps, extra=extra
            )

    def finish_save(self) -> None:
        """Wait until the checkpoint that was begun is written, and give it its name. Raises OSError if it could not be."""
        assert self._saving is not None, "no checkpoint was begun"
        saving, self._saving = self._saving, None
        with backend.device_scope():
            saving.finish()

    @property
    def is_save_written(self) -> bool:
        """Whether the files of this rank are on disk, so that `finish_save` will not wait long."""
        return self._saving is not None and self._saving.is_written

    def restore(self, directory: Path) -> bytes:
        """Continues from a checkpoint of any parallel layout; returns its `extra`."""
        self._snapshots.weights_change()
        with backend.device_scope():
            self.steps, extra = checkpoint.read_checkpoint(directory, self._model, self._optimizer)
        return extra

    def adam_steps(self) -> list[float]:
        """The number of updates of each parameter of this rank, by the optimizer's own count."""
        return adam_steps(self._optimizer)

    def _make_exporter(self) -> Exporter:
        parts = weight_parts(self._model, self._architecture)
        if self._is_packed:
            parts = packed_parts(parts, packed_names(self._source))
        carried = carried_parts(self._architecture, self._source)
        return Exporter([*parts, *carried], describe=self._describe_export)

    def _describe_export(self, partial: Path) -> None:
        copy_description(self._source, partial, weights_dtype(self.config), is_packed=self._is_packed)
        if self.config.lora.rank:
            write_adapters(self._adapters, partial / ADAPTER_DIRECTORY, self.config.lora, source=self._source)

    def _begin(self) -> StepWork:
        self._phases.take()  # clears what an audit left in it
        set_hyperparameters(self._optimizer, self.config, lr=self.config.lr_at(self.steps + 1))
        return StepWork(self._architecture)

    def _metrics(self, step: int, work: StepWork, reports: Sequence[Report]) -> StepMetrics:
        """The metrics of the step that was taken."""
        self.steps += 1
        self._tokens = {(one.request_id, one.branch): one for report in reports for one in report.tokens}
        phases = self._phases.take()
        train_s = work.stop()
        return step_metrics(
            step,
            self.config.lr_at(self.steps),
            reports,
            num_trained_tokens=work.num_trained_tokens,
            train_s=train_s,
            phases=phases,
            utilisation=work.utilisation(train_s),
        )

    def _loss_inputs(self, batch: Batch, *, num_updates: int) -> LossInputs:
        """The log-probs under other weights than the present ones that the loss needs."""
        reference = proximal = None
        if self._starting is not None:
            with self._snapshots.replaced_by(self._starting):
                reference = self.logprobs(batch.samples, batch.temperature)
        if self._loss.recomputes_proximal and num_updates > 1:
            proximal = self.logprobs(batch.samples, batch.temperature)
        return LossInputs.of(batch, reference=reference, proximal=proximal)


def _lay_out(config: LearnerConfig) -> None:
    backend.lay_out(
        tensor_parallel=config.tensor_parallel,
        pipeline_parallel=config.pipeline_parallel,
        expert_parallel=config.expert_parallel,
        context_parallel=config.context_parallel,
    )


def _forward(
    wrapped: DistributedDataParallel, model: GPTModel, architecture: Architecture, config: LearnerConfig
) -> Forward:
    head = Head(
        model,
        vocab_size=architecture.vocab_size,
        chunk_tokens=config.head_chunk_tokens,
        fp32_logits=config.head_dtype == "fp32",
    )
    positions = Positions(config, Rotary(architecture))
    routing = Routing(model, positions)
    return Forward(wrapped, head, positions, routing, architecture, max_tokens=config.micro_batch_tokens)


def _freeze(model: GPTModel, train_only: tuple[str, ...]) -> None:
    """Trains only the parameters whose names contain one of `train_only`; all if it is empty."""
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
