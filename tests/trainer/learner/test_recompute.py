"""Recomputed activations: the same gradient, bit for bit, from fewer saved bytes."""

from pathlib import Path

import pytest
import torch

from tests.trainer.learner.tiny import config, gradients, make_samples, take_step, train
from trainer.learner.config import LearnerConfig, LoraConfig
from trainer.learner.megatron import Learner


def saved_bytes(options: LearnerConfig, directory: Path) -> int:
    """What the backward pass of one step keeps from the forward pass, each storage once, weights left out."""
    learner = Learner(options, model_directory=directory)
    weights = {p.untyped_storage().data_ptr() for p in learner._model.parameters()}
    # The tensors stay alive until all are counted, or an address would be used again.
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if torch._C._current_graph_task_id() == -1:  # else it is saved by what the backward pass recomputes
            saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        take_step(learner, make_samples())
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    return sum(size for address, size in storages.items() if address not in weights)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("train_only", [(), (".mlp.",)])
def test_recomputation_leaves_losses_and_gradients_bitwise_equal(
    qwen3: Path, recompute: str, train_only: tuple[str, ...]
) -> None:
    plain = Learner(config(train_only=train_only), model_directory=qwen3)
    recomputing = Learner(config(train_only=train_only, recompute=recompute), model_directory=qwen3)
    assert train(recomputing, 3) == train(plain, 3)
    expected, observed = gradients(plain), gradients(recomputing)
    assert all(gradient.any() for gradient in expected.values())
    for name, gradient in expected.items():
        assert torch.equal(observed[name], gradient), name


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_experts_have_the_same_gradient(qwen3_moe: Path, recompute: str) -> None:
    plain, recomputing = (
        Learner(config(recompute=chosen), model_directory=qwen3_moe) for chosen in ("none", recompute)
    )
    assert train(recomputing, 2) == train(plain, 2)
    assert all(
        torch.equal(one, other)
        for one, other in zip(gradients(plain).values(), gradients(recomputing).values(), strict=True)
    )


def test_recomputation_leaves_log_probs_bitwise_equal(qwen3: Path) -> None:
    samples = make_samples()
    plain, *others = (
        Learner(config(recompute=recompute), model_directory=qwen3).logprobs(samples, 1.0)
        for recompute in ("none", "selective", "full")
    )
    for logprobs in others:
        assert all((left == right).all() for left, right in zip(plain, logprobs, strict=True))


def test_more_recomputation_saves_fewer_bytes(qwen3: Path) -> None:
    none, selective, full = (
        saved_bytes(config(recompute=recompute, micro_batch_tokens=200), qwen3)
        for recompute in ("none", "selective", "full")
    )
    assert full < selective < none
    assert full < none / 2


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_adapters_under_recomputation_have_the_same_gradient(qwen3: Path, recompute: str) -> None:
    """Everything before the first adapter is frozen, so nothing before it requires a gradient."""
    lora = LoraConfig(rank=2, alpha=4.0)
    plain, recomputing = (
        Learner(config(lora=lora, recompute=chosen), model_directory=qwen3) for chosen in ("none", recompute)
    )
    assert train(recomputing, 2) == train(plain, 2)
    assert all(
        torch.equal(one, other)
        for one, other in zip(gradients(plain).values(), gradients(recomputing).values(), strict=True)
    )
