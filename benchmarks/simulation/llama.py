"""A Llama in plain torch that samples for many sequences at once, with a key-value cache; it stands in for the engine.

Shape suffixes: R rows (sequences), N new tokens of each, K cached tokens, E width of the model, H heads, D width of a head, V
vocabulary.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

ROOM_TOKENS = 256
"""By how much more than needed a cache grows."""

CHUNK_TOKENS = 24
"""Number of tokens of each sequence that are computed at a time, at most; shorter sequences are padded."""


class LayerWeights(NamedTuple):
    """One layer's matrices; query, key and value are together, and so are gate and up projection."""

    attention_norm: Tensor
    qkv: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Weights(NamedTuple):
    """One weight version."""

    embedding_VE: Tensor  # the output layer too
    layers: tuple[LayerWeights, ...]
    norm: Tensor


def read_weights(directory: Path) -> Weights:
    """The weights of a Hugging Face directory with tied embeddings."""
    tensors = load_file(directory / "model.safetensors")
    layers: list[LayerWeights] = []
    while (prefix := f"model.layers.{len(layers)}.") + "input_layernorm.weight" in tensors:
        layers.append(
            LayerWeights(
                tensors[f"{prefix}input_layernorm.weight"],
                torch.cat([tensors[f"{prefix}self_attn.{one}_proj.weight"] for one in "qkv"]),
                tensors[f"{prefix}self_attn.o_proj.weight"],
                tensors[f"{prefix}post_attention_layernorm.weight"],
                torch.cat([tensors[f"{prefix}mlp.{one}_proj.weight"] for one in ("gate", "up")]),
                tensors[f"{prefix}mlp.down_proj.weight"],
            )
        )
    return Weights(tensors["model.embed_tokens.weight"], tuple(layers), tensors["model.norm.weight"])


class Llama:
    """The shape of the model, and its rotary embedding up to `max_tokens`."""

    def __init__(self, directory: Path, *, max_tokens: int) -> None:
        config = json.loads((directory / "config.json").read_text())
        assert config["num_attention_heads"] == config["num_key_value_heads"], (
            "grouped queries are not simulated"
        )
        self.num_heads: int = config["num_attention_heads"]
        self.head_width: int = config["hidden_size"] // self.num_heads
        self.num_layers: int = config["num_hidden_layers"]
        self.eps: float = config["rms_norm_eps"]
        theta = config["rope_parameters"]["rope_theta"]
        frequencies = theta ** -(torch.arange(0, self.head_width, 2) / self.head_width)
        angles = torch.outer(torch.arange(max_tokens), frequencies)
        self.cos, self.sin = (f(torch.cat([angles, angles], -1)) for f in (torch.cos, torch.sin))
        self.max_tokens = max_tokens


class Sequences:
    """Growing sequences under one weight version, and their cache. A row that gets no token costs nothing."""

    def __init__(self, llama: Llama, weights: Weights, num_rows: int) -> None:
        self._llama, self._weights = llama, weights
        shape = (num_rows, llama.num_heads, 0, llama.head_width)
        self._caches = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(llama.num_layers)]
        self._lengths_R = torch.zeros(num_rows, dtype=torch.long)
        # Which sequence is in which row of the cache: those that get tokens come first.
        self._order = list(range(num_rows))

    @torch.inference_mode()
    def extend(self, new: Mapping[int, list[int]]) -> tuple[list[int], Tensor]:
        """Put tokens behind sequences; returns which these are, and the logits after the last token of each, R x V."""
        logits: dict[int, Tensor] = {}
        while new:
            order, logits_RV = self._extend({number: tokens[:CHUNK_TOKENS] for number, tokens in new.items()})
            logits |= dict(zip(order, logits_RV, strict=True))
            new = {number: rest for number, tokens in new.items() if (rest := tokens[CHUNK_TOKENS:])}
        return list(logits), torch.stack(list(logits.values()))

    def _extend(self, new: Mapping[int, list[int]]) -> tuple[list[int], Tensor]:
        """The padding of shorter rows is after their end, where the next token overwrites it before anything sees it."""
        self._bring_forward(new.keys())
        order = self._order[: len(new)]
        tokens = [new[sequence] for sequence in order]
        width = max(map(len, tokens))
        ids_RN = torch.tensor([one + [0] * (width - len(one)) for one in tokens])
        lengths_R = torch.tensor([len(one) for one in tokens])
        positions_RN = self._lengths_R[: len(new), None] + torch.arange(width)
        hidden_RNE = self._hidden(ids_RN, positions_RN.clamp(max=self._llama.max_tokens - 1))
        self._lengths_R[: len(new)] += lengths_R
        last_RE = hidden_RNE[torch.arange(len(new)), lengths_R - 1]
        return order, F.linear(last_RE, self._weights.embedding_VE)

    def _bring_forward(self, sequences: Collection[int]) -> None:
        """Exchange rows so that these sequences come first."""
        first = range(len(sequences))
        leaving = [row for row in first if self._order[row] not in sequences]
        coming = [row for row in range(len(sequences), len(self._order)) if self._order[row] in sequences]
        if not leaving:
            return
        here, there = leaving + coming, coming + leaving
        for keys, values in self._caches:
            keys[here] = keys[there]
            values[here] = values[there]
        self._lengths_R[here] = self._lengths_R[there]
        moved = [self._order[row] for row in there]
        for row, sequence in zip(here, moved, strict=True):
            self._order[row] = sequence

    def _hidden(self, ids_RN: Tensor, positions_RN: Tensor) -> Tensor:
        weights, eps = self._weights, self._llama.eps
        num_keys = int(positions_RN.max()) + 1
        self._make_room(num_keys)
        unseen = torch.arange(num_keys) > positions_RN[:, :, None]
        mask = torch.zeros(unseen.shape).masked_fill_(unseen, -torch.inf)[:, None]
        turn = self._llama.cos[positions_RN][:, None], self._llama.sin[positions_RN][:, None]
        hidden = F.embedding(ids_RN, weights.embedding_VE)
        size = hidden.shape[-1:]
        for layer, cache in zip(weights.layers, self._caches, strict=True):
            normed = F.rms_norm(hidden, size, layer.attention_norm, eps)
            seen = self._attend(F.linear(normed, layer.qkv), cache, positions_RN, turn, mask)
            hidden = hidden + F.linear(seen, layer.output)
            gate, up = F.linear(F.rms_norm(hidden, size, layer.mlp_norm, eps), layer.gate_up).chunk(2, -1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
        return F.rms_norm(hidden, size, weights.norm, eps)

    def _make_room(self, num_keys: int) -> None:
        missing = num_keys - self._caches[0][0].shape[2]
        if missing > 0:
            more = (0, 0, 0, missing + ROOM_TOKENS)
            self._caches = [(F.pad(keys, more), F.pad(values, more)) for keys, values in self._caches]

    def _attend(
        self,
        qkv_RN3E: Tensor,
        cache: tuple[Tensor, Tensor],
        positions_RN: Tensor,
        turn: tuple[Tensor, Tensor],
        mask: Tensor,
    ) -> Tensor:
        num_rows, num_new = positions_RN.shape
        parts = qkv_RN3E.view(num_rows, num_new, 3, self._llama.num_heads, self._llama.head_width)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        query, key = _rotated(query, *turn), _rotated(key, *turn)
        rows = torch.arange(num_rows)[:, None]
        keys, values = (one[:num_rows] for one in cache)
        keys[rows, :, positions_RN] = key.transpose(1, 2)
        values[rows, :, positions_RN] = value.transpose(1, 2)
        num_keys = mask.shape[-1]
        seen = F.scaled_dot_product_attention(
            query, keys[:, :, :num_keys], values[:, :, :num_keys], attn_mask=mask
        )
        return seen.transpose(1, 2).reshape(num_rows, num_new, -1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def draw(logits_RV: Tensor, generator: torch.Generator) -> tuple[list[int], list[float]]:
    """A token of each row at temperature 1, and its log-prob in nats."""
    logprobs_RV = torch.log_softmax(logits_RV, -1)
    chosen_R1 = torch.multinomial(logprobs_RV.exp(), 1, generator=generator)
    return chosen_R1[:, 0].tolist(), logprobs_RV.gather(1, chosen_R1)[:, 0].tolist()
