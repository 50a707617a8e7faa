"""SGLang's attention for the CPU, `torch_native`, computed in fewer and smaller pieces. Its results are those of SGLang's own.

SGLang's own computes each sequence by itself, and for a prompt whose beginning is cached it computes that beginning's queries again and
throws them away. Here all sequences of a decode step are one call, the query heads that share a key head are its rows, and a prompt's
queries are those of its new tokens only. SGLang's own code handles what these two do not cover: encoders, sliding windows, and batches of
which padding would be the larger part.

It replaces `torch_native` in SGLang's registry of attention backends, under the same name, because SGLang
decides by that name how it allocates and schedules on a CPU.
"""

from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

MOST_PADDED = 2.0
"""The largest ratio of a batch's padded number of keys to its actual number."""


class BatchedAttention(TorchNativeAttnBackend):
    """Both methods: `query` and `output` [tokens, query heads, head size]; `k_cache` and `v_cache` [slots, key heads, head size];
    `req_to_token` [requests, context] names the slot of each token of a request; `seq_lens` [sequences].
    """

    def _run_sdpa_forward_decode(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Computes one new token of each sequence."""
        num_keys = int(seq_lens.max())
        is_mostly_padding = num_keys * len(seq_lens) > MOST_PADDED * int(seq_lens.sum())
        if is_mostly_padding or not _is_plain(query, k_cache, encoder_lens, options):
            return super()._run_sdpa_forward_decode(
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                encoder_lens,
                **options,
            )
        slots = req_to_token[req_pool_indices, :num_keys]
        is_there = torch.arange(num_keys) < seq_lens[:, None]
        # A KV slot past the end of its sequence may hold an infinity or NaN, which a weight of zero does not remove from the sum.
        slots = torch.where(is_there, slots, slots[:, :1])
        num_sequences, num_heads, head_size = query.shape
        rows = query.view(num_sequences, k_cache.shape[1], -1, head_size)  # query heads by their key head
        mixed = scaled_dot_product_attention(
            rows,
            _gathered(k_cache, slots),
            _gathered(v_cache, slots),
            attn_mask=is_there[:, None, None],
            scale=options["scaling"],
        )
        return output.copy_(mixed.reshape(num_sequences, num_heads, -1))

    def _run_sdpa_forward_extend(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        extend_prefix_lens: Tensor,
        extend_seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Computes the new tokens of each sequence, after a prefix whose keys are cached."""
        if not options["causal"] or not _is_plain(query, k_cache, encoder_lens, options):
            return super()._run_sdpa_forward_extend(
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                extend_prefix_lens,
                extend_seq_lens,
                encoder_lens,
                **options,
            )
        begin = 0
        lengths = zip(seq_lens.tolist(), extend_prefix_lens.tolist(), extend_seq_lens.tolist(), strict=True)
        for row, (num_keys, num_cached, num_new) in enumerate(lengths):
            slots = req_to_token[req_pool_indices[row], :num_keys][None]
            # The mask of a prompt without a cached beginning is a triangle, for which torch skips half of the work.
            visible = (
                torch.arange(num_keys) <= torch.arange(num_cached, num_keys)[:, None] if num_cached else None
            )
            mixed = scaled_dot_product_attention(
                query[begin : begin + num_new].transpose(0, 1)[None],
                _gathered(k_cache, slots),
                _gathered(v_cache, slots),
                attn_mask=visible,
                is_causal=visible is None,
                scale=options["scaling"],
                enable_gqa=options["enable_gqa"],
            )
            output[begin : begin + num_new] = mixed[0].transpose(0, 1)
            begin += num_new
        return output


def _is_plain(query: Tensor, k_cache: Tensor, encoder_lens: Tensor | None, options: dict[str, Any]) -> bool:
    """Whether each token sees all tokens before it in its own sequence, and the cache is of the queries' type."""
    is_windowed = options["sliding_window_size"] is not None
    is_crossed = options["is_cross_attn"] or encoder_lens is not None
    return not is_windowed and not is_crossed and query.dtype == k_cache.dtype


def _gathered(cache: Tensor, slots: Tensor) -> Tensor:
    """The content of these slots: [sequences, key heads, tokens, head size] for `slots` [sequences, tokens].

    The rows of the flat cache are copied, which is six times as fast in torch as indexing.
    """
    flat = cache.view(len(cache), -1).index_select(0, slots.reshape(-1))
    return flat.view(*slots.shape, *cache.shape[1:]).transpose(1, 2)


@register_attention_backend("torch_native")
def batched_attention(runner: Any) -> BatchedAttention:
    return BatchedAttention(runner)
