"""One optimizer update: loss and gradient over all micro-batches and ranks, then a step of the optimizer.

Gradients are summed over all micro-batches and ranks of an update and divided once, by what the aggregation of the loss says.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, distributed

from trainer.batching.batch import Sample
from trainer.batching.packing import MicroBatch
from trainer.batching.trained_tokens import SampleTokens
from trainer.learner import backend
from trainer.learner.config import NotFinite, StepMetrics
from trainer.learner.forward import Forward, LossFunction
from trainer.learner.lag_sums import SHAPE, lag_metrics
from trainer.learner.loss_inputs import LossInputs
from trainer.learner.objectives.aggregation import divisor, factors
from trainer.learner.objectives.loss import TOKEN_ROWS, policy_loss
from trainer.learner.objectives.registry import Loss
from trainer.learner.objectives.trajectories import SampleRatios, branched_samples, other_samples
from trainer.learner.phases import Phases, PhaseSeconds

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


@dataclass(frozen=True, slots=True)
class Report:
    """What one update did, on all ranks."""

    # The sums over all tokens, their divisor, the largest ratio, the gradient norm, the number of micro-batches.
    values: dict[str, float]
    by_lag: npt.NDArray[np.float64]  # as lag_sums.py has them
    tokens: tuple[SampleTokens, ...] = ()  # of each sample, if they are kept


@dataclass(frozen=True, slots=True)
class _Accumulated:
    """The samples of one call, this rank's share of them, and what was reported of its micro-batches."""

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
        self._divisor = 0  # of all that was accumulated since `begin`, on all ranks
        self._num_microbatches = 0

    def begin(self) -> None:
        """Forget what was accumulated."""
        with backend.device_scope():
            self._wrapped.zero_grad_buffer()
            self._optimizer.zero_grad()
        self._accumulated, self._divisor, self._num_microbatches = [], 0, 0

    def accumulate(self, samples: Sequence[Sample], inputs: LossInputs) -> None:
        """Add the gradient of these samples. All samples of a trajectory belong into one call."""
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
        """Change the weights once; not at all if loss or gradient is not finite on any rank."""
        with backend.device_scope(), self._phases.optimizer():
            # The gradient of all that was accumulated, summed over the ranks and divided.
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
        """The divisor on one data-parallel rank and 0 on the others, because Megatron adds up what all of them give."""
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
        """For each sample, the ratios in the other samples of its trajectory; None where no loss depends on them.

        Costs a forward pass over the trajectories that have several samples, and nothing where there is none.
        """
        branched = branched_samples(samples)
        if not self._loss.needs_other_samples or not branched:
            return None
        chosen = [samples[index] for index in branched]
        ratios = other_samples(chosen, self._forward.logprobs(chosen, temperature), self._loss.bounds)
        found = dict(zip(branched, ratios, strict=True))
        return [found.get(index, SampleRatios()) for index in range(len(samples))]

    def _tokens(self, accumulated: Sequence[_Accumulated]) -> tuple[SampleTokens, ...]:
        """What was reported of each sample, on every rank."""
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
    """What the updates of one step amount to."""
    names = (*SUMS, "divisor", "microbatches", "grad_norm")
    total = {name: sum(report.values[name] for report in reports) for name in names}
    tokens = total["tokens"]
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
        # Nothing but weights of 0: all tokens are outside the bounds.
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
        by_lag=lag_metrics(np.sum([report.by_lag for report in reports], axis=0)),
    )
