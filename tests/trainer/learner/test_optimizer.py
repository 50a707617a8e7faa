"""The optimizer against torch's own AdamW, and the recipe's values after a resume."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.learner.tiny import assert_same_run, config, gradients, make_samples, take_step, train
from trainer.learner.megatron import Learner
from trainer.learner.snapshots import copy_weights

STEPS = range(1, 5)
UNUSUAL: dict[str, Any] = {
    "lr": 3e-3,
    "warmup_steps": 3,
    "betas": (0.8, 0.6),
    "eps": 1e-3,
    "weight_decay": 0.3,
    "clip_grad": 0.05,
}
"""Far from every default, and with a bound on the gradient that each step exceeds."""


class Reference:
    """torch.optim.AdamW on copies of a learner's parameters: matrices decayed, norms and biases not."""

    def __init__(self, learner: Learner) -> None:
        weights = {name: p.cpu().clone() for name, p in copy_weights(learner._model).items()}
        self._config = learner.config
        self.parameters = {name: torch.nn.Parameter(value) for name, value in weights.items()}
        matrices = [p for p in self.parameters.values() if p.dim() > 1]
        vectors = [p for p in self.parameters.values() if p.dim() == 1]
        assert matrices
        assert vectors
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
            betas=self._config.betas,
            eps=self._config.eps,
            weight_decay=self._config.weight_decay,
        )

    def step(self, gradient: dict[str, torch.Tensor], number: int) -> float:
        """Returns the norm of the gradient before clipping."""
        for name, parameter in self.parameters.items():
            parameter.grad = gradient[name].cpu()
        norm = torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), self._config.clip_grad)
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.lr_at(number)
        self._optimizer.step()
        return float(norm)


@pytest.mark.parametrize("model", ["qwen3", "biased_qwen2"])
@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_updates_are_those_of_adamw_with_decay_on_matrices_only(
    model: str, distributed_optimizer: bool, request: pytest.FixtureRequest
) -> None:
    options = config(**UNUSUAL, distributed_optimizer=distributed_optimizer)
    learner = Learner(options, model_directory=request.getfixturevalue(model))
    start, reference = copy_weights(learner._model), Reference(learner)
    for number in STEPS:
        metrics = take_step(learner, make_samples(seed=number), step=number)
        norm = reference.step(unclipped(learner, metrics.grad_norm), number)
        assert norm > options.clip_grad
    for name, weights in copy_weights(learner._model).items():
        torch.testing.assert_close(weights, reference.parameters[name].data, rtol=1e-5, atol=1e-6)
        assert (weights - start[name]).abs().max() > 1e-4


def unclipped(learner: Learner, grad_norm: float) -> dict[str, torch.Tensor]:
    """The last update's gradient. Megatron clips it in place where the buffer is the optimizer's own gradient."""
    found = gradients(learner)
    norm = float(torch.cat([gradient.flatten() for gradient in found.values()]).norm())
    return {name: gradient * (grad_norm / norm) for name, gradient in found.items()}


def test_weight_decay_shrinks_matrices_and_leaves_norms_alone(qwen3: Path) -> None:
    """With no gradient worth the name, decay is all that is left."""
    learner = Learner(config(weight_decay=0.5, lr=0.1, eps=1e6), model_directory=qwen3)
    before = copy_weights(learner._model)
    train(learner, 1)
    for name, weights in copy_weights(learner._model).items():
        kept = 0.95 if weights.dim() > 1 else 1.0
        torch.testing.assert_close(weights, before[name] * kept, rtol=1e-5, atol=1e-5)


@pytest.mark.slow_but_for("weight_decay-False", "betas-False")
@pytest.mark.parametrize("distributed_optimizer", [False, True])
@pytest.mark.parametrize("changed", ["weight_decay", "betas", "eps"])
def test_a_resume_uses_the_values_of_the_recipe_and_not_those_of_the_checkpoint(
    qwen3: Path, tmp_path: Path, changed: str, distributed_optimizer: bool
) -> None:
    old = {"distributed_optimizer": distributed_optimizer, "weight_decay": 0.1}
    new = old | {changed: UNUSUAL[changed]}
    written = Learner(config(**old), model_directory=qwen3)
    train(written, 2)
    written.save(tmp_path / "old", b"")
    changed_in_use, resumed, unchanged = (
        Learner(config(**options), model_directory=qwen3) for options in (new, new, old)
    )
    for one in (changed_in_use, resumed, unchanged):
        one.restore(tmp_path / "old")
    train(resumed, 2)
    train(unchanged, 2)
    apart = max(
        float((left - right).abs().max())
        for left, right in zip(
            copy_weights(resumed._model).values(), copy_weights(unchanged._model).values(), strict=True
        )
    )
    assert apart > 1e-5, f"a changed {changed} made no difference"
    resumed.save(tmp_path / "new", b"")
    changed_in_use.restore(tmp_path / "new")
    assert_same_run(train(changed_in_use, 2), train(resumed, 2))


def test_another_adam_than_torchs_is_refused_with_what_to_do(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Megatron imports it with TransformerEngine or Apex."""
    monkeypatch.setattr("megatron.core.optimizer.USING_PYTORCH_OPTIMIZER", False)
    with pytest.raises(ValueError, match=r"TransformerEngine or Apex is installed.*pip uninstall"):
        Learner(config(), model_directory=qwen3)
