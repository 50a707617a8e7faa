"""Log-probabilities from hidden states: the model without its output layer, and that layer fused with the softmax after it.

Most positions of an agent's trajectory are observations, of which only the keys and values of attention are needed. So the output
layer is computed at the positions that are trained. An array of positions x vocabulary never exists, in either direction: rows are
taken in chunks, and the backward pass computes each chunk's logits again. The columns of the vocabulary are divided among the
tensor-parallel ranks, which exchange three numbers per row. The softmax is computed in fp32, whatever the type of the logits.

Shape suffixes: R rows, C rows of one chunk, E width of the model, V this rank's columns of the vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from trainer.learner import backend

LOWEST = torch.finfo(torch.float32).min
"""The peak of a rank that has no column. With an infinite one, its sums would contain 0 times infinity."""


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RE: Tensor,
        weight_VE: Tensor,
        targets_R: Tensor,
        temperature: float,
        vocab_size: int,
        chunk_tokens: int,
        fp32_logits: bool,
        entropy_gradient: bool,
        group: ProcessGroup,
    ) -> tuple[Tensor, Tensor, Tensor]:
        first = group.rank() * weight_VE.size(0)
        # Columns beyond `width` pad the vocabulary.
        width = min(weight_VE.size(0), max(vocab_size - first, 0))
        columns_R = (targets_R - first).clamp(0, max(width - 1, 0))
        mine_R = (targets_R >= first) & (targets_R < first + width)
        peaks_R = torch.full_like(targets_R, LOWEST, dtype=torch.float32)
        sums_3R = torch.zeros(3, len(targets_R), dtype=torch.float32, device=weight_VE.device)
        for rows in _chunks(len(targets_R), chunk_tokens):
            if not width:
                continue
            scaled_CV = _scaled_logits(hidden_RE[rows], weight_VE[:width], temperature, fp32_logits)
            peaks_R[rows] = scaled_CV.amax(1)
            scaled_CV.sub_(peaks_R[rows, None])
            chosen_C = scaled_CV.gather(1, columns_R[rows, None]).squeeze(1)
            exponentials_CV = scaled_CV.exp()
            sums_3R[0, rows] = exponentials_CV.sum(1)
            sums_3R[1, rows] = exponentials_CV.mul_(scaled_CV).sum(1)
            sums_3R[2, rows] = chosen_C
        normalisers_R, expectations_R, chosen_R, peaks_R = _joined(sums_3R, peaks_R, mine_R, group)
        log_normalisers_R = normalisers_R.log()
        entropies_R = log_normalisers_R - expectations_R / normalisers_R
        ctx.save_for_backward(
            hidden_RE, weight_VE, columns_R, mine_R, peaks_R + log_normalisers_R, entropies_R
        )
        ctx.temperature, ctx.width, ctx.chunk_tokens = temperature, width, chunk_tokens
        ctx.fp32_logits, ctx.entropy_gradient = fp32_logits, entropy_gradient
        ctx.mark_non_differentiable(chosen_R, *(() if entropy_gradient else (entropies_R,)))
        return chosen_R - log_normalisers_R, entropies_R, chosen_R

    @staticmethod
    def backward(
        ctx: Any, gradient_R: Tensor, of_entropy_R: Tensor, _of_margin_R: Tensor
    ) -> tuple[Tensor | None, ...]:
        """d log p(target) / d logit = (1 where the column is the target, else 0, minus p) / temperature, and
        d entropy / d logit = -p (log p + entropy) / temperature.
        """
        hidden_RE, weight_VE, columns_R, mine_R, log_sums_R, entropies_R = ctx.saved_tensors
        gradient_R = gradient_R.float() / ctx.temperature
        factor_R = of_entropy_R.float() / ctx.temperature if ctx.entropy_gradient else None
        of_hidden_RE = torch.zeros_like(hidden_RE)
        of_weight_VE = torch.zeros_like(weight_VE, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        used_VE = weight_VE[: ctx.width]
        for rows in _chunks(len(gradient_R), ctx.chunk_tokens):
            if not ctx.width:
                continue
            scaled_CV = _scaled_logits(hidden_RE[rows], used_VE, ctx.temperature, ctx.fp32_logits)
            logprobs_CV = scaled_CV.sub_(log_sums_R[rows, None])
            if factor_R is None:
                chunk_CV = logprobs_CV.exp_().mul_(-gradient_R[rows, None])
            else:
                factors_CV = (logprobs_CV + entropies_R[rows, None]).mul_(factor_R[rows, None])
                chunk_CV = factors_CV.add_(gradient_R[rows, None]).neg_().mul_(logprobs_CV.exp_())
            chunk_CV.scatter_add_(1, columns_R[rows, None], (gradient_R[rows] * mine_R[rows])[:, None])
            chunk_CV = chunk_CV.to(weight_VE.dtype)
            torch.mm(chunk_CV, used_VE, out=of_hidden_RE[rows])
            if of_weight_VE is not None:
                _add_product(of_weight_VE[: ctx.width], chunk_CV, hidden_RE[rows])
        of_weight_VE = None if of_weight_VE is None else of_weight_VE.to(weight_VE.dtype)
        return of_hidden_RE, of_weight_VE, None, None, None, None, None, None, None


def head_logprobs(
    hidden_RE: Tensor,
    weight_VE: Tensor,
    targets_R: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    chunk_tokens: int,
    fp32_logits: bool,
    group: ProcessGroup,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the targets, entropies, and margins, each float32 of R, in nats, at the sampling temperature. A margin is the log-prob
    of the target minus that of the most likely token: 0 where greedy decoding gives the target, ties included.

    `weight_VE` holds this rank's columns of the vocabulary, the last rank's possibly padded beyond `vocab_size`. At most
    `chunk_tokens` rows of logits exist at a time, in the weights' type or, with `fp32_logits`, in fp32 from the same weights.

    Gradients flow through the log-probs and, with `entropy_gradient`, through the entropies, which costs one more array of a chunk's
    logits in the backward pass. The gradient of `hidden_RE` is this rank's
    part: the sum over `group` is left to the caller. Collective over `group`.
    """
    return _HeadLogprobs.apply(
        hidden_RE,
        weight_VE,
        targets_R,
        temperature,
        vocab_size,
        chunk_tokens,
        fp32_logits,
        entropy_gradient,
        group,
    )


def _scaled_logits(hidden_CE: Tensor, weight_VE: Tensor, temperature: float, fp32_logits: bool) -> Tensor:
    """The logits in fp32, which the caller may overwrite."""
    if not fp32_logits or hidden_CE.dtype == torch.float32:
        logits_CV = hidden_CE @ weight_VE.T
    elif hidden_CE.is_cuda:
        logits_CV = torch.mm(hidden_CE, weight_VE.T, out_dtype=torch.float32)
    else:
        logits_CV = hidden_CE.float() @ weight_VE.float().T
    return logits_CV.float().div_(temperature)


def _add_product(total_VE: Tensor, gradient_CV: Tensor, hidden_CE: Tensor) -> None:
    """Adds gradient^T hidden in fp32, whatever the operands' type, because rounding errors of the chunks would accumulate."""
    if gradient_CV.is_cuda and gradient_CV.dtype != torch.float32:
        torch.addmm(total_VE, gradient_CV.T, hidden_CE, out_dtype=torch.float32, out=total_VE)
    else:
        total_VE.addmm_(gradient_CV.float().T, hidden_CE.float())


def _joined(
    sums_3R: Tensor, peaks_R: Tensor, mine_R: Tensor, group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sums over all ranks, relative to the common peak x0: sum of e^(x - x0), of (x - x0) e^(x - x0), x - x0 of the target, and x0.

    The given sums are relative to this rank's own peak.
    """
    common_R = peaks_R.clone()
    all_reduce(common_R, op=ReduceOp.MAX, group=group)
    shift_R = peaks_R - common_R
    scale_R = shift_R.exp()
    normalisers_R, expectations_R, chosen_R = sums_3R
    joined_3R = torch.stack(
        [
            normalisers_R * scale_R,
            (expectations_R + normalisers_R * shift_R) * scale_R,
            torch.where(mine_R, chosen_R + shift_R, 0.0),
        ]
    )
    all_reduce(joined_3R, group=group)
    return joined_3R[0], joined_3R[1], joined_3R[2], common_R


def _chunks(num_rows: int, chunk_tokens: int) -> Iterator[slice]:
    for start in range(0, num_rows, chunk_tokens):
        yield slice(start, start + chunk_tokens)


class HeadlessModel(GPTModel):
    """Megatron's GPTModel, whose forward pass ends with the hidden states. It still owns the weights of the output layer."""

    def _postprocess(self, hidden_states: Tensor, **_unused: Any) -> Tensor:
        return hidden_states


class Head:
    """The output layer of a model's last pipeline stage."""

    def __init__(self, model: GPTModel, *, vocab_size: int, chunk_tokens: int, fp32_logits: bool) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._chunk_tokens = chunk_tokens
        self._fp32_logits = fp32_logits

    def logprobs(
        self,
        hidden_P1E: Tensor,
        rows_R: Tensor,
        targets_R: Tensor,
        temperature: float,
        *,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs of the targets at some positions, the entropies there and the margins, float32 of R; the entropies have a gradient if
        `entropy_gradient`, the margins have none.

        With sequence parallelism `hidden_P1E` is this rank's part of the positions. `rows_R` counts over all of them.
        """
        if self._model.config.sequence_parallel:
            gathered_P1E: Tensor = gather_from_sequence_parallel_region(hidden_P1E)
            hidden_RE = gathered_P1E[:, 0].index_select(0, rows_R)
        else:
            hidden_RE = copy_to_tensor_model_parallel_region(hidden_P1E[:, 0].index_select(0, rows_R))
        return head_logprobs(
            hidden_RE,
            output_weight(self._model),
            targets_R,
            temperature=temperature,
            vocab_size=self._vocab_size,
            chunk_tokens=self._chunk_tokens,
            fp32_logits=self._fp32_logits,
            entropy_gradient=entropy_gradient,
            group=backend.tensor_parallel_group(),
        )


def output_weight(model: GPTModel) -> torch.nn.Parameter:
    """This rank's columns of the output layer. In a tied model with one pipeline stage it is the embedding's weight; with several, the last
    stage has a copy.
    """
    tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    assert isinstance(weight, torch.nn.Parameter)
    return weight
