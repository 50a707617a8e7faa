"""The gradient of every objective: against its closed form, written down once more in numpy, and against finite differences."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.trainer.learner.objectives.tokens import loss_of, tokens
from trainer.learner.config import LossConfig, LossKind
from trainer.learner.objectives.registry import OBJECTIVES
from trainer.learner.objectives.tokens import Tokens

Array = npt.NDArray[np.float64]
TRAJECTORIES = (slice(0, 20), slice(20, 60))


def example(spread: float = 0.3) -> Tokens:
    """Sixty tokens in double precision, some far from the behaviour and from the proximal policy."""
    rng = np.random.default_rng(3)
    behaviour = -rng.uniform(0.3, 3.0, 60)
    proximal = behaviour + rng.normal(0, spread, 60)
    segments = np.zeros(60, np.int64)
    segments[TRAJECTORIES[1]] = 1
    return tokens(
        torch.from_numpy(np.minimum(proximal + rng.normal(0, 0.2, 60), -0.01)),
        torch.from_numpy(behaviour),
        torch.from_numpy(rng.normal(0, 1, 60)),
        proximal_logprobs_P=torch.from_numpy(proximal),
        segments_P=torch.from_numpy(segments),
    )


def autograd(given: Tokens, config: LossConfig) -> Array:
    leaf = given.policy_logprobs_P.clone().requires_grad_()
    loss, _ = loss_of(replace(given, policy_logprobs_P=leaf), config)
    return torch.autograd.grad(loss, leaf)[0].numpy()


def clipped(ratios: Array, advantages: Array, low: float, high: float, dual: float = np.inf) -> Array:
    """d -min(x A, clip(x) A) / d log x."""
    stopped = ((advantages > 0) & (ratios > 1 + high)) | ((advantages < 0) & (ratios < 1 - low))
    stopped |= (advantages < 0) & (ratios > dual)
    return np.where(stopped, 0, -ratios * advantages)


def stream_grpo(pi: Array, mu: Array, prox: Array, A: Array) -> Array:
    ratios = np.exp(pi - mu)
    masked = np.sign(A) * (np.exp(pi) - np.exp(mu)) > 0.2
    return np.where(masked, 0, -np.minimum(ratios, 5) * A) + 2e-3 * (pi - mu)


def gspo(pi: Array, mu: Array, prox: Array, A: Array) -> Array:
    means = np.concatenate([np.full(len(pi[one]), (pi - mu)[one].mean()) for one in TRAJECTORIES])
    return clipped(np.exp(means), A, 3e-4, 4e-4)


def around_the_proximal(weigh: Callable[[Array], Array], low: float, high: float) -> Callable[..., Array]:
    def closed_form(pi: Array, mu: Array, prox: Array, A: Array) -> Array:
        return weigh(np.exp(prox - mu)) * clipped(np.exp(pi - prox), A, low, high)

    return closed_form


CLOSED_FORMS: dict[LossKind, Callable[[Array, Array, Array, Array], Array]] = {
    "stream_grpo": stream_grpo,
    "cispo": lambda pi, mu, prox, A: -np.minimum(np.exp(pi - mu), 5) * A,
    "grpo": lambda pi, mu, prox, A: clipped(np.exp(pi - mu), A, 0.2, 0.28, 3),
    "dr_grpo": lambda pi, mu, prox, A: clipped(np.exp(pi - mu), A, 0.2, 0.2),
    "gspo": gspo,
    "decoupled_ppo": around_the_proximal(lambda w: np.where(w > 5, 0, w), 0.2, 0.2),
    "tis": around_the_proximal(lambda w: np.minimum(w, 2), 0.2, 0.28),
    "icepop": around_the_proximal(lambda w: np.where((w < 0.5) | (w > 5), 0, w), 0.2, 0.28),
    "topr": lambda pi, mu, prox, A: -np.where(A > 0, 1, np.minimum(np.exp(pi - mu), 1)) * A,
    "reinforce": lambda pi, mu, prox, A: -A,
    "sft": lambda pi, mu, prox, A: -np.ones_like(A),
}


@pytest.mark.parametrize("spread", [0.05, 0.5, 1.5])
@pytest.mark.parametrize("kind", OBJECTIVES)
def test_every_objective_has_its_closed_form_gradient(kind: LossKind, spread: float) -> None:
    given = example(spread)
    arrays = (
        given.policy_logprobs_P,
        given.behaviour_logprobs_P,
        given.proximal_logprobs_P,
        given.advantages_P,
    )
    expected = CLOSED_FORMS[kind](*(array.numpy() for array in arrays))  # pyright: ignore[reportOptionalMemberAccess]
    np.testing.assert_allclose(autograd(given, LossConfig(kind=kind)), expected, rtol=1e-9, atol=1e-12)
    assert np.any(expected)


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_on_policy_every_objective_is_the_policy_gradient(kind: LossKind) -> None:
    given = example()
    policy = given.policy_logprobs_P
    on_policy = replace(given, behaviour_logprobs_P=policy, proximal_logprobs_P=None)
    config = LossConfig(kind=kind, geometric_mask=(0.99, 1.01))
    advantages = np.ones(60) if kind == "sft" else given.advantages_P.numpy()
    np.testing.assert_allclose(autograd(on_policy, config), -advantages, rtol=1e-9)


@pytest.mark.parametrize("changes", [{"reference_kl_kind": "k2"}, {"reference_kl_kind": "k3"}])
@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "decoupled_ppo", "tis", "icepop", "reinforce", "sft"])
def test_the_gradient_is_the_slope_of_the_loss(kind: LossKind, changes: dict[str, Any]) -> None:
    """For the objectives that hold nothing constant which depends on the policy."""
    given = example()
    given = replace(given, reference_logprobs_P=given.behaviour_logprobs_P - 0.3)
    config = LossConfig(kind=kind, reference_kl=0.5, **changes)
    step, policy = 1e-6, given.policy_logprobs_P
    slopes = np.zeros(60)
    for index in range(60):
        shift = torch.zeros_like(policy)
        shift[index] = step
        up, down = (
            loss_of(replace(given, policy_logprobs_P=policy + sign * shift), config)[0].item()
            for sign in (1, -1)
        )
        slopes[index] = (up - down) / (2 * step)
    np.testing.assert_allclose(autograd(given, config), slopes, rtol=1e-5, atol=1e-7)
