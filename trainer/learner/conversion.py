"""Weights from a Hugging Face directory to a Megatron checkpoint and back, without an optimizer, under any parallel layout.

Each rank holds only its part of the model. A checkpoint can be read under another layout than it was written in.
"""

from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel

from trainer.learner import backend, checkpoint, hf
from trainer.learner.architecture import read_architecture
from trainer.learner.config import LearnerConfig
from trainer.learner.export import Exporter, copy_description, weight_parts
from trainer.learner.model import build_model


def to_checkpoint(source: Path, target: Path, config: LearnerConfig) -> None:
    """Write the weights of a Hugging Face directory as a checkpoint of step 0. Collective."""
    model = _build(source, config)
    with backend.device_scope():
        hf.read_weights(model, source)
        model.to(backend.device())
        checkpoint.begin_checkpoint(target, model, None, steps=0, extra=b"").finish()


def to_hugging_face(source: Path, target: Path, config: LearnerConfig, *, model_directory: Path) -> None:
    """Write the weights of a checkpoint as a Hugging Face directory, config and tokenizer from `model_directory`. Collective.

    The weights keep the type that they have in the checkpoint.
    """
    model = _build(model_directory, config)
    dtype = checkpoint.weights_dtype_in(source)
    with backend.device_scope():
        model.to(device=backend.device(), dtype=dtype)
        checkpoint.read_weights(source, model)
    exporter = Exporter(
        weight_parts(model, vocab_size=read_architecture(model_directory).vocab_size),
        describe=lambda partial: copy_description(model_directory, partial, dtype),
    )
    exporter.write(target)


def _build(model_directory: Path, config: LearnerConfig) -> GPTModel:
    backend.lay_out(
        tensor_parallel=config.tensor_parallel,
        pipeline_parallel=config.pipeline_parallel,
        expert_parallel=config.expert_parallel,
    )
    torch.manual_seed(config.seed)
    with backend.device_scope():
        return build_model(read_architecture(model_directory), config)
