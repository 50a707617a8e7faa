"""Log-probability of the target and entropy of the distribution, from logits split over tensor-parallel ranks.

Everything is computed in fp32, whatever the logits' type, and in chunks of rows, so that beside the logits and their gradient
no array as wide as the vocabulary is held. Shape suffixes: P positions, V this rank's columns of the vocabulary, C rows of one
chunk.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

CHUNK_ELEMENTS = 1 << 26
"""fp32 numbers in one chunk: 256 MiB."""


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_PV: Tensor,
        targets_P: Tensor,
        temperature: float,
        vocab_size: int,
        group: ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        first = group.rank() * logits_PV.size(1)
        # Columns beyond `width` pad the vocabulary.
        width = min(logits_PV.size(1), max(vocab_size - first, 0))
        columns_P = (targets_P - first).clamp(0, max(width - 1, 0))
        mine_P = (targets_P >= first) & (targets_P < first + width)
        peaks_P = torch.full_like(targets_P, -torch.inf, dtype=torch.float32)
        for rows in _chunks(logits_PV):
            if width:
                peaks_P[rows] = logits_PV[rows, :width].float().amax(1) / temperature
        all_reduce(peaks_P, op=ReduceOp.MAX, group=group)
        sums_3P = torch.zeros(3, len(targets_P), dtype=torch.float32, device=logits_PV.device)
        for rows in _chunks(logits_PV):
            shifted_CV = logits_PV[rows, :width].float() / temperature - peaks_P[rows, None]
            exponentials_CV = shifted_CV.exp()
            sums_3P[0, rows] = exponentials_CV.sum(1)
            sums_3P[1, rows] = (exponentials_CV * shifted_CV).sum(1)
            if width:
                chosen_C = shifted_CV.gather(1, columns_P[rows, None]).squeeze(1)
                sums_3P[2, rows] = torch.where(mine_P[rows], chosen_C, 0.0)
        all_reduce(sums_3P, group=group)
        normalisers_P, expectations_P, chosen_P = sums_3P
        log_normalisers_P = normalisers_P.log()
        ctx.save_for_backward(logits_PV, columns_P, mine_P, peaks_P + log_normalisers_P)
        ctx.temperature, ctx.width = temperature, width
        entropies_P = log_normalisers_P - expectations_P / normalisers_P
        ctx.mark_non_differentiable(entropies_P)
        return chosen_P - log_normalisers_P, entropies_P

    @staticmethod
    def backward(ctx: Any, gradient_P: Tensor, _entropies: Tensor) -> tuple[Tensor | None, ...]:
        """d log p(target) / d logit = (1 where the column is the target, else 0, minus p) / temperature."""
        logits_PV, columns_P, mine_P, log_sums_P = ctx.saved_tensors
        gradient_P = gradient_P.float() / ctx.temperature
        gradient_PV = torch.zeros_like(logits_PV)
        for rows in _chunks(logits_PV):
            if not ctx.width:
                continue
            probabilities_CV = (
                logits_PV[rows, : ctx.width].float() / ctx.temperature - log_sums_P[rows, None]
            ).exp()
            chunk_CV = probabilities_CV.mul_(-gradient_P[rows, None])
            chunk_CV.scatter_add_(1, columns_P[rows, None], (gradient_P[rows] * mine_P[rows])[:, None])
            gradient_PV[rows, : ctx.width] = chunk_CV.to(gradient_PV.dtype)
        return gradient_PV, None, None, None, None


def vocab_parallel_logprobs(
    logits_PV: Tensor, targets_P: Tensor, *, temperature: float, vocab_size: int, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets and entropies, both float32 of P, in nats, at the sampling temperature.

    `logits_PV` holds this rank's share of the columns, the last rank's possibly padded beyond `vocab_size`.
    Gradients flow through the log-probs only; the entropies are for reporting. Collective over `group`.
    """
    return _VocabParallelLogprobs.apply(logits_PV, targets_P, temperature, vocab_size, group)


def _chunks(logits_PV: Tensor) -> Iterator[slice]:
    rows = max(1, CHUNK_ELEMENTS // logits_PV.size(1))
    for start in range(0, logits_PV.size(0), rows):
        yield slice(start, start + rows)
