"""A real reward model for a real engine: the tiny Llama with a head of one output."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.tiny_llama import HIDDEN, config, normal, random_weights, write_checkpoint


def write_reward_checkpoint(directory: Path) -> Path:
    write_checkpoint(directory)
    head = {"score.weight": normal(np.random.default_rng(3), (1, HIDDEN))}
    save_file(random_weights(0) | head, directory / "model.safetensors", metadata={"format": "pt"})
    kind = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    (directory / "config.json").write_text(json.dumps(config() | kind))
    return directory
