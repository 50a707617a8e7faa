"""One optimizer update: loss and gradient over all micro-batches and ranks, then a step of the optimizer.

Gradients are summed over all micro-batches of an update and divided once, by the update's trained tokens on all ranks.
"""

import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, distributed

from trainer.batching.batch import Batch, Sample
from trainer.batching.packing import MicroBatch
from trainer.learner import backend
from trainer.learner.config import LossConfig, NotFinite, StepMetrics
from trainer.learner.forward import Forward, Logprobs, LossFunction, to_device
from trainer.learner.loss import OBJECTIVES, Tokens, find_vetoed_elsewhere, policy_loss

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

Report = dict[str, float]
"""The sums over all tokens of an update, its largest ratio, gradient norm and number of micro-batches."""


class Updater:
    """Updates one model by one objective."""

    def __init__(
        self,
        forward: Forward,
        wrapped: DistributedDataParallel,
        optimizer: MegatronOptimizer,
        config: LossConfig,
    ) -> None:
        self._forward = forward
        self._wrapped = wrapped
        self._optimizer = optimizer
        self._config = config

    def update(
        self, samples: Sequence[Sample], reference: Logprobs | None, temperature: float
    ) -> Report | NotFinite:
        """Change the weights once; not at all if loss or gradient is not finite on any rank.

        `reference` are the samples' log-probs under the starting weights, None where the objective has no pull to them.
        """
        mine = self._forward.share(samples)
        prepare = functools.partial(
            self._prepare_loss,
            reference=reference,
            vetoed_elsewhere=self._vetoed_elsewhere(samples, temperature),
            temperature=temperature,
        )
        with backend.device_scope():
            self._wrapped.zero_grad_buffer()
            self._optimizer.zero_grad()
        report = self._reduce(self._forward.run(mine, prepare, train=True))
        if not math.isfinite(report["loss"]):
            return NotFinite(what="loss")
        if report.pop("broken_gradients"):
            return NotFinite(what="gradient")
        with backend.device_scope():
            _, grad_norm, _ = cast(tuple[bool, float, Any], self._optimizer.step())
        return report | {"microbatches": len(mine), "grad_norm": grad_norm}

    def _prepare_loss(
        self,
        microbatch: MicroBatch,
        *,
        reference: Logprobs | None,
        vetoed_elsewhere: Sequence[bool],
        temperature: float,
    ) -> LossFunction:
        def loss(logits_1PV: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            logprobs_P, entropies_P = self._forward.token_logprobs(logits_1PV, microbatch, temperature)
            tokens = Tokens(
                policy_logprobs_P=logprobs_P,
                behaviour_logprobs_P=to_device(microbatch.behaviour_logprobs_P),
                advantages_P=to_device(microbatch.advantages_P),
                trained_P=to_device(microbatch.trained_P),
                segments_P=to_device(microbatch.segments_P),
                vetoed_elsewhere_P=to_device(_over_positions(vetoed_elsewhere, microbatch)),
                entropies_P=entropies_P,
                reference_logprobs_P=_reference_of(microbatch, reference),
            )
            total, sums = policy_loss(tokens, self._config)
            return total, sums["tokens"].to(torch.int), sums

        return loss

    def _vetoed_elsewhere(self, samples: Sequence[Sample], temperature: float) -> list[bool]:
        """Which samples an impossible ratio in another sample of their trajectory vetoes.

        Costs a forward pass over the trajectories that have several samples, and nothing where there is none.
        """
        branched = branched_samples(samples)
        if not OBJECTIVES[self._config.kind].needs_veto or not branched:
            return [False] * len(samples)
        chosen = [samples[index] for index in branched]
        verdicts = find_vetoed_elsewhere(chosen, self._forward.logprobs(chosen, temperature), self._config)
        found = dict(zip(branched, verdicts, strict=True))
        return [found.get(index, False) for index in range(len(samples))]

    def _reduce(self, reports: list[dict[str, Tensor]]) -> Report:
        """Sums (and the maximum) over micro-batches and ranks; `broken_gradients` counts gradients without a finite norm."""
        sums = torch.zeros(len(SUMS) + 1, dtype=torch.float64, device=backend.device())
        peak = torch.zeros((), dtype=torch.float64, device=backend.device())
        if self._forward.reports:
            for report in reports:
                sums[:-1] += torch.stack([report[name].double() for name in SUMS])
                peak = torch.maximum(peak, report["ratio_max"].double())
        # Megatron's gradient buffers, which have taken the name of a method of torch's.
        gradients = cast(list[Any], self._wrapped.buffers)
        norms = (torch.linalg.vector_norm(buffer.grad_data) for buffer in gradients)
        sums[-1] = sum(int(not norm.isfinite()) for norm in norms)
        distributed.all_reduce(sums)
        distributed.all_reduce(peak, op=distributed.ReduceOp.MAX)
        named = dict(zip((*SUMS, "broken_gradients"), sums.tolist(), strict=True))
        return named | {"ratio_max": peak.item()}


def branched_samples(samples: Sequence[Sample]) -> list[int]:
    """Indices of those that are not their trajectory's only one."""
    counts = Counter(sample.request_id for sample in samples)
    return [index for index, sample in enumerate(samples) if counts[sample.request_id] > 1]


def step_metrics(batch: Batch, lr: float, reports: Sequence[Report], *, train_s: float) -> StepMetrics:
    """What the updates of one step amount to."""
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


def _over_positions(of_samples: Sequence[bool], microbatch: MicroBatch) -> npt.NDArray[np.bool_]:
    values_S = np.array([of_samples[index] for index in microbatch.samples] or [False])
    return values_S[microbatch.segments_P]


def _reference_of(microbatch: MicroBatch, reference: Logprobs | None) -> Tensor | None:
    if reference is None:
        return None
    values = [reference[index][1:] for index in microbatch.samples]
    return to_device(np.concatenate(values) if values else np.zeros(microbatch.num_positions, np.float32))
