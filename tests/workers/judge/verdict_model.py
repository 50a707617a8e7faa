r"""A real checkpoint for a real engine that replies \boxed{+1} or \boxed{-1} to whatever it is asked, by even chance or always the same.

It is the tiny Llama without attention, in which one layer maps each token of the verdict to the next. What it replies depends on the
last token of the prompt alone.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from tests.tiny_llama import END, random_weights, write_checkpoint

SHARPNESS = 20.0  # of the distribution over the next token: the wanted ones share all but 1e-8 of it
PULL = 16.0


def write_verdict_checkpoint(directory: Path, signs: str) -> Path:
    """Of a model that draws the sign of its verdict from `signs`."""
    write_checkpoint(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    start = tokenizer.encode("<|im_start|>assistant\n").ids[-1]
    opening = [tokenizer.token_to_id(piece) for piece in ("\\", "b", "o", "x", "e", "d", "{")]
    ending = [tokenizer.token_to_id(piece) for piece in ("1", "}", END)]
    choice = [tokenizer.token_to_id(sign) for sign in signs]
    chain = [start, *opening]
    steps = [(before, [after]) for before, after in itertools.pairwise(chain)]
    steps += [(opening[-1], choice), *((sign, [ending[0]]) for sign in choice)]
    steps += [(before, [after]) for before, after in itertools.pairwise(ending)]
    save_file(mapping(steps), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def mapping(steps: Sequence[tuple[int, Sequence[int]]]) -> dict[str, NDArray[np.float32]]:
    """Weights with which each first token is followed by one of its second ones."""
    weights = random_weights(seed=1)
    embedding = weights["model.embed_tokens.weight"]
    unit = embedding / np.linalg.norm(embedding, axis=1, keepdims=True)
    weights["model.embed_tokens.weight"] = (0.4 * unit).astype(np.float32)
    weights["model.norm.weight"] *= SHARPNESS
    for name, weight in weights.items():
        if ".self_attn.o_proj." in name or ".mlp.down_proj." in name:
            weight[:] = 0
    gate, up, down = (weights[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    gate[:], up[:] = 0, 0
    for neuron, (before, after) in enumerate(steps):
        gate[neuron], up[neuron] = PULL * unit[before], PULL * unit[before]
        down[:, neuron] = unit[list(after)].sum(axis=0)
    return weights
