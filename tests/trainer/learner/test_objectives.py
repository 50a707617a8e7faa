"""The registry of objectives tells the truth about what each reads and needs."""

import logging
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch

from tests.trainer.learner.test_loss import tokens
from tests.trainer.learner.tiny import config
from trainer.learner.config import LossConfig, LossKind
from trainer.learner.loss import OBJECTIVES, ineffective_fields, policy_loss
from trainer.learner.megatron import Learner

CHANGES: dict[str, Any] = {
    "ratio_cap": 1.5,
    "delta": 0.01,
    "anchor": 0.5,
    "veto_low": 0.9,
    "veto_high": 1.1,
    "clip_low": 0.01,
    "clip_high": 0.01,
    "reference_kl": 0.3,
}
"""A value for each field that shows wherever the field is read."""


def outcome(config: LossConfig, **changes: torch.Tensor) -> list[float]:
    """Gradient and sums over tokens whose ratios lie on both sides of 1, near and far."""
    behaviour = torch.tensor([-1.0, -1.2, -0.7, -2.0, -0.5, -1.5])
    policy = (behaviour + torch.tensor([0.6, -0.5, 0.1, 0.9, 0.02, -0.15])).requires_grad_()
    advantages = torch.tensor([1.0, -1.0, -0.5, -2.0, 1.5, 0.5])
    segments = torch.arange(6)
    loss, sums = policy_loss(
        tokens(
            policy,
            behaviour,
            advantages,
            segments_P=segments,
            reference_logprobs_P=behaviour - 0.3,
            **changes,
        ),
        config,
    )
    (gradient,) = torch.autograd.grad(loss, policy)
    return [*gradient.tolist(), *(float(value) for value in sums.values())]


def test_every_kind_that_a_recipe_may_name_is_registered() -> None:
    assert set(get_args(LossKind)) == OBJECTIVES.keys()


def test_every_field_is_tried() -> None:
    assert CHANGES.keys() | {"kind"} == {field.name for field in msgspec.structs.fields(LossConfig)}


@pytest.mark.parametrize("kind", get_args(LossKind))
@pytest.mark.parametrize("field", CHANGES)
def test_an_objective_reads_the_fields_that_it_names_and_no_others(kind: LossKind, field: str) -> None:
    plain, changed = LossConfig(kind=kind), LossConfig(**{"kind": kind, field: CHANGES[field]})
    reads = field in OBJECTIVES[kind].reads or field == "reference_kl"
    assert (outcome(plain) != outcome(changed)) is reads
    assert ineffective_fields(changed) == ([] if reads else [field])


@pytest.mark.parametrize("kind", get_args(LossKind))
def test_an_objective_that_needs_the_veto_uses_it(kind: LossKind) -> None:
    vetoed = outcome(LossConfig(kind=kind), vetoed_elsewhere_P=torch.tensor([True, *[False] * 5]))
    assert (outcome(LossConfig(kind=kind)) != vetoed) is OBJECTIVES[kind].needs_veto


def test_the_learner_warns_of_a_field_that_its_objective_does_not_read(
    qwen3: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "swerve.learner"):
        Learner(config(loss=LossConfig(kind="ppo_clip", delta=0.1)), model_directory=qwen3)
    assert caplog.messages == ["learner.loss.delta has no effect on kind = 'ppo_clip'"]
