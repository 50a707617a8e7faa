"""The registry of objectives tells the truth about what each reads and needs."""

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch

from tests.trainer.learner.objectives.tokens import loss_of, tokens
from tests.trainer.learner.tiny import config
from trainer.learner.config import LossConfig, LossKind
from trainer.learner.megatron import Learner
from trainer.learner.objectives.registry import OBJECTIVES, ineffective_fields, resolve
from trainer.learner.objectives.tokens import OtherSamples, Tokens

NUMBERS: dict[str, Any] = {
    "ratio_cap": 1.2,
    "ratio_floor": 0.8,
    "delta": 0.01,
    "anchor": 0.5,
    "veto_low": 0.9,
    "veto_high": 1.1,
    "clip_low": 0.01,
    "clip_high": 0.01,
    "dual_clip": 1.05,
}
"""A value for each number of an objective that shows wherever it is read."""

TERMS: dict[str, Any] = {
    "reference_kl": 0.3,
    "entropy": 0.1,
    "geometric_mask": (0.95, 1.05),
}
"""The same for what every objective can be given."""

OTHERS = {"kind", "objective", "proximal", "aggregation", "constant_tokens", "reference_kl_kind"}
"""Fields that have tests of their own."""


def example() -> Tokens:
    """Tokens whose ratios lie on both sides of 1, near and far."""
    behaviour = torch.tensor([-1.0, -1.2, -0.7, -2.0, -0.5, -1.5])
    return tokens(
        (behaviour + torch.tensor([0.6, -0.5, 0.1, 0.9, 0.02, -0.15])).requires_grad_(),
        behaviour,
        torch.tensor([1.0, -1.0, -0.5, -2.0, 1.5, 0.5]),
        segments_P=torch.arange(6),
        entropies_P=torch.ones(6),
        reference_logprobs_P=behaviour - 0.3,
        proximal_logprobs_P=behaviour + torch.tensor([0.5, -0.4, 0.05, 0.1, 0.0, -0.1]),
        lags_P=torch.tensor([0, 1, 2, 3, 4, 5]),
    )


def outcome(config: LossConfig, given: Tokens | None = None) -> list[float]:
    """Gradient and sums."""
    given = given or example()
    loss, sums = loss_of(given, config)
    (gradient,) = torch.autograd.grad(loss, given.policy_logprobs_P)
    return [*gradient.tolist(), *(number for value in sums.values() for number in value.flatten().tolist())]


def test_every_kind_that_a_recipe_may_name_is_registered() -> None:
    assert set(get_args(LossKind)) == OBJECTIVES.keys()


def test_every_field_is_tried() -> None:
    assert NUMBERS.keys() | TERMS.keys() | OTHERS == {
        field.name for field in msgspec.structs.fields(LossConfig)
    }


@pytest.mark.parametrize("kind", get_args(LossKind))
@pytest.mark.parametrize("field", [*NUMBERS, *TERMS])
def test_an_objective_reads_the_fields_that_it_names_and_no_others(kind: LossKind, field: str) -> None:
    plain, changed = LossConfig(kind=kind), LossConfig(**{"kind": kind, field: (NUMBERS | TERMS)[field]})
    reads = field in (*OBJECTIVES[kind].bounds.used, *TERMS)
    assert (outcome(plain) != outcome(changed)) is reads
    assert ineffective_fields(resolve(changed)) == ([] if reads else [field])


@pytest.mark.parametrize("kind", get_args(LossKind))
def test_an_objective_that_uses_the_proximal_policy_says_so(kind: LossKind) -> None:
    present = replace(example(), proximal_logprobs_P=None)
    uses = OBJECTIVES[kind].uses_proximal
    assert (outcome(LossConfig(kind=kind)) != outcome(LossConfig(kind=kind), present)) is uses
    between = LossConfig(kind=kind, proximal="log_linear")
    assert (outcome(LossConfig(kind=kind)) != outcome(between)) is uses
    assert ineffective_fields(resolve(between)) == ([] if uses else ["proximal"])


@pytest.mark.parametrize("kind", get_args(LossKind))
def test_an_objective_that_uses_the_whole_trajectory_says_so(kind: LossKind) -> None:
    others = OtherSamples(torch.arange(6) == 0, torch.full((6,), 0.5), torch.ones(6))
    informed = outcome(LossConfig(kind=kind), replace(example(), other_samples=others))
    assert (outcome(LossConfig(kind=kind)) != informed) is OBJECTIVES[kind].uses_trajectory


def test_a_recipe_changes_single_numbers_of_an_objective_and_keeps_the_others() -> None:
    loss = resolve(LossConfig(kind="gspo", clip_high=1e-3, aggregation="token"))
    assert (loss.bounds.clip_low, loss.bounds.clip_high, loss.aggregation) == (3e-4, 1e-3, "token")
    assert resolve(LossConfig(kind="gspo")).aggregation == "trajectory"
    assert resolve(LossConfig(kind="dr_grpo")).aggregation == "constant"


def test_a_key_that_only_another_choice_reads_is_told() -> None:
    assert ineffective_fields(resolve(LossConfig(constant_tokens=7))) == ["constant_tokens"]
    assert ineffective_fields(resolve(LossConfig(constant_tokens=7, kind="dr_grpo"))) == []
    assert ineffective_fields(resolve(LossConfig(reference_kl_kind="k1"))) == ["reference_kl_kind"]
    assert ineffective_fields(resolve(LossConfig(reference_kl_kind="k1", reference_kl=1e-3))) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dual_clip": 0.5}, "dual_clip is 0.5; it must be above 1, or 0 for none"),
        ({"geometric_mask": (1.1, 1.2)}, "geometric_mask must enclose 1"),
        ({"objective": "my.py"}, 'objective is "my.py"; write it as "my.py:name"'),
        ({"objective": "my.py:f", "kind": "cispo"}, 'in place of learner.loss.kind = "cispo": remove one'),
        ({"kind": "sft", "reference_kl": 0.1, "reference_kl_kind": "k1"}, 'choose "k2" or "k3"'),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        LossConfig(**changes)


def test_the_learner_warns_of_a_field_that_its_objective_does_not_read(
    qwen3: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "swerve.learner"):
        Learner(config(loss=LossConfig(kind="grpo", delta=0.1)), model_directory=qwen3)
    assert caplog.messages == ["learner.loss.delta has no effect on kind = 'grpo'"]
