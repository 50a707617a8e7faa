"""One optimizer update: its samples, the inputs of their loss, loss and gradient over all micro-batches and ranks, then a step of the
optimizer.

Gradients are summed over all micro-batches and ranks of an update and divided once, by the divisor of the loss's aggregation.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, distributed

from trainer.batching.batch import Batch, Sample, SampleTokens
from trainer.batching.packing import MicroBatch
from trainer.learner import backend
from trainer.learner.config import LearnerConfig, NotFinite, StepMetrics
from trainer.learner.forward import Forward, Logprobs, LossFunction, to_device
from trainer.learner.objectives.loss import (
    SHAPE,
    TOKEN_ROWS,
    divisor,
    factors,
    lag_metrics,
    lags_of,
    policy_loss,
    signal_metrics,
)
from trainer.learner.objectives.registry import Loss
from trainer.learner.objectives.tokens import (
    OtherSamples,
    SampleRatios,
    Tokens,
    branched_samples,
    other_samples,
)
from trainer.learner.phases import Phases, PhaseSeconds


def minibatches(batch: Batch, config: LearnerConfig) -> Iterator[list[int]]:
    """Indices of the samples of each update: every epoch has a new division, which is the same on all ranks and in reruns.

    The division depends on the set of samples, not on their order. A trajectory is never divided. Samples without a
    trained token are left out, and so is an update without any sample.
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


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The inputs of the loss of some samples. Each list has one entry per sample; None where the loss does not use it."""

    temperature: float
    # Lag by weight version, as in the batch.
    lags: Mapping[int, int] = field(default_factory=dict[int, int])
    reference: Logprobs | None = None  # log-probs under the weights that the run started with
    # Log-probs under the weights at the start of the step; None: these are the present weights.
    proximal: Logprobs | None = None
    # Ratios of the other samples of each sample's trajectory
    other_samples: Sequence[SampleRatios] | None = None
    # The factor on the loss of each sample's tokens: objectives/loss.py.
    factors: Sequence[float] | None = None

    @classmethod
    def of(cls, batch: Batch, *, reference: Logprobs | None, proximal: Logprobs | None) -> "LossInputs":
        return cls(batch.temperature, batch.lags, reference, proximal)

    def chosen(self, indices: Sequence[int]) -> "LossInputs":
        """The inputs of the samples at `indices`."""
        return replace(
            self,
            reference=None if self.reference is None else [self.reference[index] for index in indices],
            proximal=None if self.proximal is None else [self.proximal[index] for index in indices],
        )

    def tokens(self, microbatch: MicroBatch, logprobs_P: Tensor, entropies_P: Tensor) -> Tokens:
        """The tokens of a micro-batch of these samples, with the log-probs and entropies from the model."""
        return Tokens(
            policy_logprobs_P=logprobs_P,
            behaviour_logprobs_P=to_device(microbatch.behaviour_logprobs_P),
            advantages_P=to_device(microbatch.advantages_P),
            trained_P=to_device(microbatch.trained_P),
            segments_P=to_device(microbatch.segments_P),
            entropies_P=entropies_P,
            proximal_logprobs_P=_joined(self.proximal, microbatch),
            reference_logprobs_P=_joined(self.reference, microbatch),
            lags_P=to_device(lags_of(microbatch.versions_P, self.lags)),
            other_samples=self._other_samples(microbatch),
        )

    def factors_of(self, microbatch: MicroBatch) -> Tensor | None:
        """The factor of the sample at each position."""
        return None if self.factors is None else _repeated(self.factors, microbatch, np.float32)

    def _other_samples(self, microbatch: MicroBatch) -> OtherSamples | None:
        if self.other_samples is None:
            return None
        others = self.other_samples
        return OtherSamples(
            vetoed_P=_repeated([one.is_vetoed for one in others], microbatch, np.bool_),
            log_ratio_sums_P=_repeated([one.log_ratio_sum for one in others], microbatch, np.float32),
            num_tokens_P=_repeated([one.num_tokens for one in others], microbatch, np.float32),
        )


def _repeated(of_samples: Sequence[float], microbatch: MicroBatch, dtype: npt.DTypeLike) -> Tensor:
    """The value of the sample at each position."""
    values_S: npt.NDArray[Any] = np.array([of_samples[index] for index in microbatch.samples] or [0], dtype)
    return to_device(values_S[microbatch.segments_P])


def _joined(logprobs: Logprobs | None, microbatch: MicroBatch) -> Tensor | None:
    """Log-probs of the targets at each position."""
    if logprobs is None:
        return None
    values = [logprobs[index][1:] for index in microbatch.samples]
    return to_device(np.concatenate(values) if values else np.zeros(microbatch.num_positions, np.float32))


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
"""The sums over tokens that `policy_loss` reports."""


@dataclass(frozen=True, slots=True)
class Report:
    """The results of one update, on all ranks."""

    # The sums over all tokens, their divisor, the largest ratio, the gradient norm, the number of micro-batches.
    values: dict[str, float]
    by_lag: npt.NDArray[np.float64]  # sums by lag, as objectives/loss.py returns them
    tokens: tuple[SampleTokens, ...] = ()  # tokens of each sample, if they are kept


@dataclass(frozen=True, slots=True)
class _Accumulated:
    """The samples of one call, this rank's share of them, and the reports about its micro-batches."""

    samples: Sequence[Sample]
    mine: Sequence[MicroBatch]
    reports: Sequence[dict[str, Tensor]]


class Updater:
    """Updates one model by one objective: `begin`, then `accumulate` once or several times, then `apply`."""

    def __init__(
        self,
        forward: Forward,
        wrapped: DistributedDataParallel,
        optimizer: MegatronOptimizer,
        loss: Loss,
        phases: Phases,
        *,
        keep_tokens: bool,
    ) -> None:
        self._forward = forward
        self._wrapped = wrapped
        self._optimizer = optimizer
        self._loss = loss
        self._phases = phases
        self._keep_tokens = keep_tokens
        self._accumulated: list[_Accumulated] = []
        self._divisor = 0  # divisor for all samples accumulated since `begin`, on all ranks
        self._num_microbatches = 0

    def begin(self) -> None:
        """Discards what was accumulated."""
        with backend.device_scope():
            self._wrapped.zero_grad_buffer()
            self._optimizer.zero_grad()
        self._accumulated, self._divisor, self._num_microbatches = [], 0, 0

    def accumulate(self, samples: Sequence[Sample], inputs: LossInputs) -> None:
        """Adds the gradient of these samples. All samples of a trajectory must be in the same call."""
        mine = self._forward.share(samples)
        config, aggregation = self._loss.config, self._loss.aggregation
        inputs = replace(
            inputs,
            other_samples=self._other_samples(samples, inputs.temperature),
            factors=factors(samples, aggregation),
        )
        prepare = functools.partial(self._prepare_loss, inputs=inputs)
        reports = self._forward.run(mine, prepare, train=True)
        self._accumulated.append(_Accumulated(samples, mine, reports))
        self._divisor += divisor(samples, aggregation, constant_tokens=config.constant_tokens)
        self._num_microbatches += len(mine)

    def apply(self) -> Report | NotFinite:
        """Changes the weights once; not at all if loss or gradient is not finite on any rank."""
        with backend.device_scope(), self._phases.optimizer():
            # Makes the gradient of all accumulated samples: summed over the ranks and divided.
            finalize_model_grads([self._wrapped], self._divisor_counted_once())
        accumulated, self._accumulated = self._accumulated, []
        sums, by_lag = self._reduce([report for part in accumulated for report in part.reports])
        if not math.isfinite(sums["loss"]):
            return NotFinite(what="loss")
        if sums.pop("broken_gradients"):
            return NotFinite(what="gradient")
        with backend.device_scope(), self._phases.optimizer():
            _, grad_norm, _ = cast(tuple[bool, float, Any], self._optimizer.step())
        counts = {"divisor": self._divisor, "microbatches": self._num_microbatches}
        tokens = self._tokens(accumulated) if self._keep_tokens else ()
        return Report(sums | counts | {"grad_norm": grad_norm}, by_lag, tokens)

    def _divisor_counted_once(self) -> Tensor:
        """The divisor on one data-parallel rank and 0 on the others, because Megatron adds up the values of all of them."""
        first = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        return torch.tensor(self._divisor if first else 0, dtype=torch.int, device=backend.device())

    def _prepare_loss(self, microbatch: MicroBatch, *, inputs: LossInputs) -> LossFunction:
        def loss(hidden_P1E: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            logprobs_P, entropies_P = self._forward.token_logprobs(
                hidden_P1E,
                microbatch,
                inputs.temperature,
                entropy_gradient=self._loss.config.entropy > 0,
            )
            tokens = inputs.tokens(microbatch, logprobs_P, entropies_P)
            total, sums = policy_loss(
                tokens, self._loss, inputs.factors_of(microbatch), keep_tokens=self._keep_tokens
            )
            return total, sums["tokens"].to(torch.int), sums

        return loss

    def _other_samples(self, samples: Sequence[Sample], temperature: float) -> list[SampleRatios] | None:
        """The ratios of the other samples of its trajectory, for each sample; None where no loss depends on them.

        This costs a forward pass over the trajectories that have several samples, and nothing if there is none.
        """
        branched = branched_samples(samples)
        if not self._loss.needs_other_samples or not branched:
            return None
        chosen = [samples[index] for index in branched]
        ratios = other_samples(chosen, self._forward.logprobs(chosen, temperature), self._loss.bounds)
        found = dict(zip(branched, ratios, strict=True))
        return [found.get(index, SampleRatios()) for index in range(len(samples))]

    def _tokens(self, accumulated: Sequence[_Accumulated]) -> tuple[SampleTokens, ...]:
        """The reports about the tokens of each sample, on every rank."""
        found: list[SampleTokens] = []
        for part in accumulated:
            rows = [
                self._forward.gathered(
                    part.samples, part.mine, [report["by_token"][row] for report in part.reports]
                )
                for row in range(len(TOKEN_ROWS))
            ]
            for sample, logprobs_T, weights_T, reasons_T in zip(part.samples, *rows, strict=True):
                reasons = reasons_T.astype(np.uint8)
                found.append(SampleTokens(sample.request_id, sample.branch, logprobs_T, weights_T, reasons))
        return tuple(found)

    def _reduce(self, reports: list[dict[str, Tensor]]) -> tuple[dict[str, float], npt.NDArray[np.float64]]:
        """Sums (and the maximum) over micro-batches and ranks; `broken_gradients` counts gradients without a finite norm. The table
        is the sums by lag.
        """
        by_lag = torch.zeros(SHAPE, dtype=torch.float64, device=backend.device())
        sums = torch.zeros(len(SUMS) + 1, dtype=torch.float64, device=backend.device())
        peak = torch.zeros((), dtype=torch.float64, device=backend.device())
        if self._forward.reports:
            for report in reports:
                sums[:-1] += torch.stack([report[name].double() for name in SUMS])
                by_lag += report["by_lag"]
                peak = torch.maximum(peak, report["ratio_max"].double())
        # Megatron's gradient buffers, which have taken the name of a method of torch's.
        gradients = cast(list[Any], self._wrapped.buffers) + self._wrapped.expert_parallel_buffers
        norms = (torch.linalg.vector_norm(buffer.grad_data) for buffer in gradients)
        sums[-1] = sum(int(not norm.isfinite()) for norm in norms)
        distributed.all_reduce(sums)
        distributed.all_reduce(by_lag)
        distributed.all_reduce(peak, op=distributed.ReduceOp.MAX)
        named = dict(zip((*SUMS, "broken_gradients"), sums.tolist(), strict=True))
        return named | {"ratio_max": peak.item()}, by_lag.cpu().numpy()


def step_metrics(
    step: int,
    lr: float,
    reports: Sequence[Report],
    *,
    num_trained_tokens: int,
    train_s: float,
    phases: PhaseSeconds,
    utilisation: float | None,
) -> StepMetrics:
    """The metrics of a step from the reports of its updates."""
    names = (*SUMS, "divisor", "microbatches", "grad_norm")
    total = {name: sum(report.values[name] for report in reports) for name in names}
    tokens = total["tokens"]
    by_lag = np.sum([report.by_lag for report in reports], axis=0)
    return StepMetrics(
        step=step,
        loss=total["loss"] / total["divisor"],
        grad_norm=total["grad_norm"] / len(reports),
        lr=lr,
        num_trained_tokens=num_trained_tokens,
        num_microbatches=int(total["microbatches"]),
        num_updates=len(reports),
        entropy=total["entropy"] / tokens,
        ratio_mean=total["ratio"] / tokens,
        ratio_max=max(report.values["ratio_max"] for report in reports),
        # All weights are 0: every token is outside the bounds.
        ess_share=total["weight"] ** 2 / (tokens * total["weight_squared"])
        if total["weight_squared"]
        else 0.0,
        masked_share=total["masked"] / tokens,
        vetoed_share=total["vetoed"] / tokens,
        behaviour_kl=total["behaviour_kl"] / tokens,
        reference_kl=total["reference_kl"] / tokens,
        train_s=train_s,
        forward_s=phases.forward_s,
        backward_s=phases.backward_s,
        optimizer_s=phases.optimizer_s,
        utilisation=utilisation,
        by_lag=lag_metrics(by_lag),
        signal=signal_metrics(by_lag),
    )
