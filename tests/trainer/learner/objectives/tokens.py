"""Tokens for tests of the objectives, and the gradient of a loss with respect to the policy's log-probs."""

from typing import Any

import torch
from torch import Tensor

from trainer.learner.config import LossConfig
from trainer.learner.objectives.loss import policy_loss
from trainer.learner.objectives.registry import resolve
from trainer.learner.objectives.tokens import Tokens


def tokens(policy: Tensor, behaviour: Tensor, advantages: Tensor, **changes: Any) -> Tokens:
    """All trained, of one sample, unless `changes` says otherwise."""
    defaults = {
        "trained_P": torch.ones(len(policy), dtype=torch.bool),
        "segments_P": torch.zeros(len(policy), dtype=torch.int64),
        "entropies_P": torch.zeros(len(policy)),
    }
    return Tokens(
        policy_logprobs_P=policy,
        behaviour_logprobs_P=behaviour,
        advantages_P=advantages,
        **(defaults | changes),
    )


def loss_of(given: Tokens, config: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    return policy_loss(given, resolve(config))


def gradient(
    policy: Tensor, behaviour: Tensor, advantages: Tensor, config: LossConfig, **changes: Any
) -> Tensor:
    leaf = policy.clone().requires_grad_()
    loss, _ = loss_of(tokens(leaf, behaviour, advantages, **changes), config)
    return torch.autograd.grad(loss, leaf)[0]
