"""The optimizer's tensors are on the device only while it updates, and nothing else changes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.learner.tiny import assert_same_run, config, largest_difference, train
from trainer.learner.megatron import Learner
from trainer.learner.optimizer import inner_optimizers
from trainer.learner.snapshots import copy_weights

LAYOUTS = [
    {"dtype": dtype, "distributed_optimizer": distributed_optimizer}
    for dtype in ("fp32", "bf16")
    for distributed_optimizer in (False, True)
]


def optimizer_tensors(learner: Learner) -> list[torch.Tensor]:
    """What the optimizer updates, and its state."""
    optimizers = [part.optimizer for part in inner_optimizers(learner._optimizer)]
    states = (value for one in optimizers for state in one.state.values() for value in state.values())
    return [
        *(parameter for one in optimizers for group in one.param_groups for parameter in group["params"]),
        *(value for value in states if isinstance(value, torch.Tensor)),
    ]


def places(learner: Learner) -> set[int]:
    """Where the optimizer's tensors lie that are no part of the model."""
    in_model = {p.untyped_storage().data_ptr() for p in learner._model.parameters()}
    tensors = [tensor for tensor in optimizer_tensors(learner) if tensor.dim()]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors} - in_model


@pytest.mark.slow_but_for(
    "{'dtype': 'fp32', 'distributed_optimizer': False*", "{'dtype': 'bf16', 'distributed_optimizer': False*"
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_offloaded_optimizer_learns_the_same_bit_for_bit(
    qwen3: Path, layout: dict[str, Any], tmp_path: Path
) -> None:
    plain = Learner(config(**layout), model_directory=qwen3)
    offloaded, resumed = (
        Learner(config(offload_optimizer=True, **layout), model_directory=qwen3) for _ in range(2)
    )
    assert_same_run(train(offloaded, 2), train(plain, 2))
    offloaded.save(tmp_path / "checkpoint", b"")
    resumed.restore(tmp_path / "checkpoint")
    expected = train(plain, 3)
    for learner in (offloaded, resumed):
        assert_same_run(train(learner, 3), expected)
        assert largest_difference(copy_weights(learner._model), copy_weights(plain._model)) == 0


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_between_updates_its_tensors_lie_on_the_host(qwen3: Path, layout: dict[str, Any]) -> None:
    """The host's buffers stay the same ones. On a CPU the device is other memory of the same kind."""
    learner = Learner(config(offload_optimizer=True, **layout), model_directory=qwen3)
    train(learner, 1)
    on_host, in_update = places(learner), []
    for part in inner_optimizers(learner._optimizer):
        part.optimizer.register_step_pre_hook(lambda *_: in_update.append(places(learner)))
    train(learner, 2)
    assert places(learner) == on_host
    assert len(in_update) == 2
    assert not any(during & on_host for during in in_update)
    originals = 1 if layout["dtype"] == "bf16" else 0
    num_trained = len([p for p in learner._model.parameters() if p.requires_grad])
    assert len(on_host) == (2 + originals) * num_trained
    assert all(tensor.device == torch.device("cpu") for tensor in optimizer_tensors(learner))
