"""Routing replay: tokens go to the experts that an engine reported, as in Hugging Face's model with the same choice."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.small_models import GLM4_MOE, write_model
from tests.trainer.learner.tiny import (
    assert_same_run,
    config,
    gradients,
    largest_difference,
    make_samples,
    read_reference,
    reference_logprobs,
    routed,
    train,
)
from trainer.batching.batch import Sample
from trainer.learner.architecture import layout_faults
from trainer.learner.families.registry import read_architecture
from trainer.learner.megatron import Learner


def force(reference: PreTrainedModel, sample: Sample) -> None:
    """Make the routers of Hugging Face's model choose what the sample says, and weigh it as they would."""
    assert sample.routing is not None
    experts = torch.from_numpy(sample.routing.reshape(sample.num_tokens - 1, 2, -1)).long()
    for number, layer in enumerate(reference.model.layers):

        def choose(
            hidden: torch.Tensor, gate: torch.nn.Module = layer.mlp.gate, number: int = number
        ) -> tuple:
            logits = hidden.reshape(-1, gate.hidden_dim) @ gate.weight.T
            chosen = logits.topk(gate.top_k, dim=-1).indices
            chosen[:-1] = experts[:, number]  # the last token is no input of ours
            return logits, logits.gather(1, chosen).softmax(-1), chosen

        layer.mlp.gate.forward = choose


def test_logprobs_are_those_of_the_reported_experts(qwen3_moe: Path) -> None:
    samples = routed(make_samples(), read_architecture(qwen3_moe))
    learner = Learner(config(routing_replay=True, micro_batch_tokens=200), model_directory=qwen3_moe)
    own = learner.logprobs(make_samples(), 1.0)
    for sample, observed, unforced in zip(samples, learner.logprobs(samples, 1.0), own, strict=True):
        reference = read_reference(qwen3_moe)
        force(reference, sample)
        expected = reference_logprobs(reference, sample).detach().numpy()
        kept = sample.trained_T[1:]
        np.testing.assert_allclose(observed[1:][kept], expected[kept], atol=2e-5)
        if sample.num_tokens > 2:
            assert np.abs(observed - unforced).max() > 0.1


def test_a_model_whose_first_layer_has_no_experts_replays_those_of_the_others(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "glm4_moe", **GLM4_MOE)
    samples = routed(make_samples(), read_architecture(directory))
    learner = Learner(config(routing_replay=True, micro_batch_tokens=200), model_directory=directory)
    for sample, observed in zip(samples, learner.logprobs(samples, 1.0), strict=True):
        reference = read_reference(directory)
        assert sample.routing is not None
        experts = torch.from_numpy(sample.routing.reshape(sample.num_tokens - 1, 4, -1)).long()
        for number, layer in enumerate(reference.model.layers[1:], 1):
            layer.mlp.route_tokens_to_experts = partial(chosen_weights, layer.mlp, experts[:, number])
        expected = reference_logprobs(reference, sample).detach().numpy()
        kept = sample.trained_T[1:]
        np.testing.assert_allclose(observed[1:][kept], expected[kept], atol=2e-5)


def chosen_weights(
    mlp: torch.nn.Module, experts: torch.Tensor, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each position and their weights, as GLM's router weighs them; the last position, which is no input of ours, gets the
    first experts.
    """
    chosen = torch.cat([experts, torch.arange(mlp.top_k)[None]])
    scores = logits.sigmoid().gather(1, chosen)
    return chosen, scores / scores.sum(-1, keepdim=True) * mlp.routed_scaling_factor


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_layers_replay_the_same_experts(qwen3_moe: Path, recompute: str) -> None:
    """Several micro-batches a step: each backward pass must find the experts of its own."""
    learners = [
        Learner(config(routing_replay=True, recompute=one), model_directory=qwen3_moe)
        for one in ("none", recompute)
    ]
    assert_same_run(*(train(learner, 2) for learner in learners))
    assert largest_difference(*(gradients(learner) for learner in learners)) == 0


def test_reports_are_expected_only_where_they_are_replayed(qwen3_moe: Path) -> None:
    architecture = read_architecture(qwen3_moe)
    assert architecture.reported_experts(config(routing_replay=True)) == 2 * 3
    assert architecture.reported_experts(config()) == 0


def test_a_model_without_experts_has_no_routing_to_replay(qwen3: Path) -> None:
    (fault,) = layout_faults(read_architecture(qwen3), config(routing_replay=True))
    assert fault == "learner.routing_replay: the model has no experts; set it to false"
