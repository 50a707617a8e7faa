"""Megatron's AdamW over the trained parameters: how it is built, what the recipe sets of it, and undoing its updates.

Matrices are decayed; norms and biases are not.
"""

from typing import Any, cast

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from torch import Tensor

from trainer.learner.config import LearnerConfig
from trainer.learner.model import weights_dtype
from trainer.learner.offload import keep_on_host
from trainer.learner.snapshots import copy_weights, load_weights


def build_optimizer(wrapped: DistributedDataParallel, config: LearnerConfig) -> MegatronOptimizer:
    """Over the parameters that require a gradient. Call inside `backend.device_scope`."""
    options = OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        weight_decay=config.weight_decay,
        clip_grad=config.clip_grad,
        bf16=config.dtype == "bf16",
        params_dtype=weights_dtype(config),
        use_distributed_optimizer=config.distributed_optimizer,
    )
    overrides = get_standard_config_overrides(options)
    optimizer = get_megatron_optimizer(options, [wrapped], config_overrides=overrides)
    if config.offload_optimizer:
        keep_on_host(optimizer, inner_optimizers(optimizer), wrapped)
    return optimizer


def set_hyperparameters(optimizer: MegatronOptimizer, config: LearnerConfig, *, lr: float) -> None:
    """Make the next update use these values. A restored checkpoint brings the values of the run that wrote it.

    Megatron puts parameters of one dimension into a group with `wd_mult` 0, but leaves it to its own scheduler, which we do
    not use, to apply that factor.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["betas"] = config.betas
        group["eps"] = config.eps
        group["weight_decay"] = config.weight_decay * group["wd_mult"]


def inner_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    """Megatron's wrappers, each around one torch optimizer."""
    return cast(list[Any], getattr(optimizer, "chained_optimizers", [optimizer]))


def adam_steps(optimizer: MegatronOptimizer) -> list[float]:
    """How often each parameter of this rank has been updated."""
    states = (part.optimizer.state for part in inner_optimizers(optimizer))
    return [float(state["step"]) for by_parameter in states for state in by_parameter.values()]


class Undo:
    """Host copies of weights and optimizer state, to take back the updates made since."""

    def __init__(self, model: torch.nn.Module, optimizer: MegatronOptimizer) -> None:
        self._model = model
        self._optimizers = [part.optimizer for part in inner_optimizers(optimizer)]
        self._weights = copy_weights(model)
        self._parameters = [[_copy(p) for p in _parameters(one)] for one in self._optimizers]
        self._states = [
            [{name: _copy(value) for name, value in one.state.get(p, {}).items()} for p in _parameters(one)]
            for one in self._optimizers
        ]

    @torch.no_grad()
    def __call__(self) -> None:
        """Put everything back, bit for bit."""
        load_weights(self._model, self._weights)
        for one, parameters, states in zip(self._optimizers, self._parameters, self._states, strict=True):
            for parameter, value, state in zip(_parameters(one), parameters, states, strict=True):
                parameter.copy_(value)
                if not state:
                    one.state.pop(parameter, None)
                for name, kept in state.items():
                    one.state[parameter][name].copy_(kept)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors that the optimizer updates: with half-precision weights, their fp32 copies."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _copy(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)
