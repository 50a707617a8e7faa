from collections.abc import Iterable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.version import Version
from transformers import PreTrainedModel

from tests.trainer.learner.tiny import (
    config,
    gradients,
    make_batch,
    make_samples,
    read_reference,
    reference_logprobs,
    relative_difference,
    take_step,
    train,
    trained_throughout,
)
from trainer.batching.batch import Sample
from trainer.learner.config import LearnerConfig, LossConfig
from trainer.learner.megatron import Learner
from trainer.learner.snapshots import copy_weights


def joined(samples: tuple[Sample, ...]) -> Sample:
    """All samples as if they were one: what packing without boundaries would compute."""
    arrays = ("tokens_T", "trained_T", "behaviour_logprobs_T", "advantages_T", "versions_T")
    return replace(
        samples[0], **{name: np.concatenate([getattr(sample, name) for sample in samples]) for name in arrays}
    )


def test_megatron_is_of_the_line_this_was_written_for() -> None:
    """Its checkpoints need mending in this line, and the next needs more of CUDA than the stand-ins give."""
    assert Version("0.16.1") <= Version(metadata.version("megatron-core")) < Version("0.17")


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_packed_logprobs_are_those_of_each_sample_by_itself(qwen3: Path, temperature: float) -> None:
    samples, reference = trained_throughout(make_samples()), read_reference(qwen3)
    learner = Learner(config(micro_batch_tokens=200), model_directory=qwen3)
    for sample, observed in zip(samples, learner.logprobs(samples, temperature), strict=True):
        assert observed.dtype == np.float32
        assert observed[0] == 0
        expected = reference_logprobs(reference, sample, temperature).detach().numpy()
        np.testing.assert_allclose(observed[1:], expected, atol=2e-5)


def test_likelihoods_say_which_tokens_greedy_decoding_gives(qwen3: Path) -> None:
    samples, reference = make_samples(), read_reference(qwen3)
    samples = tuple(with_likeliest_tokens(sample, reference) for sample in samples)
    learner = Learner(config(micro_batch_tokens=200), model_directory=qwen3)
    logprobs, likeliest = learner.likelihoods(samples)
    for found, wanted in zip(logprobs, learner.logprobs(samples, 1.0), strict=True):
        np.testing.assert_array_equal(found, wanted)
    for sample, found in zip(samples, likeliest, strict=True):
        ids = torch.from_numpy(sample.tokens_T).long()
        wanted = (reference(ids[None]).logits[0, :-1].argmax(1) == ids[1:]).numpy() & sample.trained_T[1:]
        np.testing.assert_array_equal(found[1:], wanted)
    assert 0 < sum(found.sum() for found in likeliest) < sum(sample.num_trained_tokens for sample in samples)


def with_likeliest_tokens(sample: Sample, reference: PreTrainedModel) -> Sample:
    """The sample with its last token replaced by the one that greedy decoding gives."""
    tokens = sample.tokens_T.copy()
    tokens[-1] = int(reference(torch.from_numpy(tokens[:-1]).long()[None]).logits[0, -1].argmax())
    trained = sample.trained_T.copy()
    trained[-1] = True
    return replace(sample, tokens_T=tokens, trained_T=trained)


def test_logits_of_a_half_precision_model_can_be_computed_in_full(qwen3: Path) -> None:
    samples = make_samples()
    rounded, full = (
        np.concatenate(
            Learner(config(dtype="bf16", head_dtype=dtype), model_directory=qwen3).logprobs(samples, 1.0)
        )
        for dtype in ("model", "fp32")
    )
    assert 1e-4 < np.abs(rounded - full).max() < 0.1


def test_packing_without_boundaries_would_be_noticed(qwen3: Path) -> None:
    samples = trained_throughout(make_samples())
    learner = Learner(config(micro_batch_tokens=200), model_directory=qwen3)
    apart, together = learner.logprobs(samples, 1.0), learner.logprobs([joined(samples)], 1.0)[0]
    difference = np.abs(
        np.concatenate([a[1:] for a in apart[1:]])
        - np.concatenate(
            [b[1:] for b in np.split(together, np.cumsum([sample.num_tokens for sample in samples])[:-1])[1:]]
        )
    )
    assert difference.max() > 0.5


@pytest.mark.parametrize("model", ["qwen3", "tied_llama"])
def test_the_gradient_is_that_of_hugging_face_over_single_samples(
    model: str, request: pytest.FixtureRequest
) -> None:
    directory = request.getfixturevalue(model)
    samples, reference = make_samples(), read_reference(directory)
    learner = Learner(config(clip_grad=0.0, loss=LossConfig(kind="reinforce")), model_directory=directory)
    metrics = take_step(learner, samples)
    trained = [torch.from_numpy(sample.trained_T[1:]) for sample in samples]
    weighted = [
        -(reference_logprobs(reference, sample) * torch.from_numpy(sample.advantages_T[1:]))[chosen].sum()
        for sample, chosen in zip(samples, trained, strict=True)
    ]
    loss = sum(weighted) / sum(int(chosen.sum()) for chosen in trained)
    loss.backward()
    assert metrics.loss == pytest.approx(loss.item(), rel=1e-4)
    observed = gradients(learner)
    same = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "decoder.layers.0.self_attention.linear_proj.weight": "model.layers.0.self_attn.o_proj.weight",
        "decoder.layers.1.mlp.linear_fc2.weight": "model.layers.1.mlp.down_proj.weight",
    }
    for ours, theirs in same.items():
        expected = reference.get_parameter(theirs).grad
        torch.testing.assert_close(
            observed[ours].cpu(), expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max())
        )


def test_the_gradient_depends_neither_on_order_nor_on_micro_batch_size(qwen3: Path) -> None:
    samples = make_samples()
    learners = [
        Learner(config(micro_batch_tokens=tokens, clip_grad=0.0), model_directory=qwen3)
        for tokens in (32, 50, 300, 300)
    ]
    reports = [take_step(learner, samples) for learner in learners[:3]]
    reports.append(take_step(learners[3], samples[::-1]))
    assert len({report.num_microbatches for report in reports}) > 2
    for learner, report in zip(learners[1:], reports[1:], strict=True):
        assert relative_difference(learners[0], learner) <= 1e-5
        assert report.loss == pytest.approx(reports[0].loss, rel=1e-5)


def test_a_gradient_from_other_samples_would_be_noticed(qwen3: Path) -> None:
    learners = [Learner(config(clip_grad=0.0), model_directory=qwen3) for _ in range(2)]
    take_step(learners[0], make_samples())
    take_step(learners[1], make_samples()[:-1])
    assert relative_difference(*learners) > 1e-2


def test_learning_raises_what_was_rewarded_and_lowers_what_was_not(qwen3: Path) -> None:
    samples = tuple(
        replace(sample, advantages_T=np.where(sample.trained_T, 1 - 2 * (index % 2), 0).astype(np.float32))
        for index, sample in enumerate(make_samples())
    )
    learner = Learner(config(lr=1e-3, loss=LossConfig(kind="reinforce")), model_directory=qwen3)
    before = learner.logprobs(samples, 1.0)
    for step in range(1, 6):
        take_step(learner, samples, step=step)
    after = learner.logprobs(samples, 1.0)
    for index, sample in enumerate(samples):
        moved = (after[index] - before[index])[sample.trained_T].mean()
        assert moved * (1 - 2 * (index % 2)) > 0


def test_metrics_of_an_on_policy_step_say_so(qwen3: Path) -> None:
    learner = Learner(config(), model_directory=qwen3)
    samples = make_samples()
    drawn = learner.logprobs(samples, 1.0)
    on_policy = tuple(
        replace(sample, behaviour_logprobs_T=np.where(sample.trained_T, logprobs, 0).astype(np.float32))
        for sample, logprobs in zip(samples, drawn, strict=True)
    )
    metrics = take_step(learner, on_policy, step=7)
    assert metrics.step == 7
    assert metrics.num_trained_tokens == sum(sample.num_trained_tokens for sample in samples)
    assert metrics.ratio_mean == pytest.approx(1, abs=1e-4)
    assert metrics.ratio_max == pytest.approx(1, abs=1e-3)
    assert metrics.ess_share == pytest.approx(1, abs=1e-4)
    assert metrics.masked_share == metrics.vetoed_share == 0
    assert metrics.behaviour_kl == pytest.approx(0, abs=1e-5)
    assert 0 < metrics.entropy < np.log(64)
    assert metrics.grad_norm > 0


def test_metrics_of_an_off_policy_step_have_their_closed_forms(qwen3: Path) -> None:
    samples, bounds = make_samples(), LossConfig(ratio_cap=1.5, delta=0.005, veto_low=1e-9, veto_high=1e9)
    learner = Learner(
        config(loss=bounds, num_minibatches=2, micro_batch_tokens=33, lr=1e-9), model_directory=qwen3
    )
    policy = learner.logprobs(samples, 1.0)

    def trained(arrays: Iterable[np.ndarray]) -> np.ndarray:
        pairs = zip(arrays, samples, strict=True)
        return np.concatenate([array[sample.trained_T] for array, sample in pairs]).astype(np.float64)

    after, before = trained(policy), trained(sample.behaviour_logprobs_T for sample in samples)
    ratios = np.exp(after - before)
    weights = np.minimum(ratios, 1.5)
    assert weights.std() > 0.1
    moved = np.sign(trained(sample.advantages_T for sample in samples)) * (np.exp(after) - np.exp(before))
    metrics = take_step(learner, samples)
    assert metrics.num_microbatches > metrics.num_updates == 2
    assert metrics.ess_share == pytest.approx(
        weights.sum() ** 2 / (len(weights) * (weights**2).sum()), rel=1e-4
    )
    assert metrics.ratio_mean == pytest.approx(ratios.mean(), rel=1e-4)
    assert metrics.ratio_max == pytest.approx(ratios.max(), rel=1e-4)
    assert metrics.behaviour_kl == pytest.approx((ratios - 1 - np.log(ratios)).mean(), rel=1e-4)
    assert 0 < metrics.masked_share == pytest.approx((moved > 0.005).mean())
    signals = np.abs(trained(sample.advantages_T for sample in samples)) * (1 - np.exp(after))
    by_signal = metrics.signal
    assert by_signal is not None
    assert by_signal.total == pytest.approx(signals.sum(), rel=1e-4)
    assert by_signal.num_tokens == pytest.approx(signals.sum() ** 2 / (signals**2).sum(), rel=1e-4)
    assert by_signal.ess_share == pytest.approx(
        (signals * weights).sum() ** 2 / (signals.sum() * (signals * weights**2).sum()), rel=1e-4
    )
    assert by_signal.behaviour_kl == pytest.approx(
        np.average(ratios - 1 - np.log(ratios), weights=signals), rel=1e-4
    )
    assert by_signal.masked_share == pytest.approx(np.average(moved > 0.005, weights=signals), rel=1e-4)
    assert by_signal.masked_share != pytest.approx(metrics.masked_share, rel=1e-2)


def test_only_the_named_parameters_are_trained(qwen3: Path) -> None:
    learner = Learner(config(train_only=(".mlp.",)), model_directory=qwen3)
    before = copy_weights(learner._model)
    train(learner, 2)
    changed = {
        name
        for name, weights in copy_weights(learner._model).items()
        if not torch.equal(weights, before[name])
    }
    assert changed == {name for name in before if ".mlp." in name}


def test_a_name_that_matches_no_parameter_is_refused(qwen3: Path) -> None:
    with pytest.raises(ValueError, match="train_only"):
        Learner(config(train_only=("feed_forward",)), model_directory=qwen3)


def test_several_updates_of_one_batch_count_as_one_step(qwen3: Path) -> None:
    learner = Learner(config(num_minibatches=2, num_epochs=2), model_directory=qwen3)
    metrics = take_step(learner, make_samples())
    assert (learner.steps, metrics.num_updates) == (1, 4)
    assert set(learner.adam_steps()) == {4.0}


def test_a_pull_to_the_start_keeps_the_policy_nearer_to_it(qwen3: Path) -> None:
    free = Learner(config(loss=LossConfig(reference_kl=1e-9)), model_directory=qwen3)
    bound = Learner(config(loss=LossConfig(reference_kl=1.0)), model_directory=qwen3)
    for step in range(1, 5):
        batch = make_batch(make_samples(), step=step)
        loose, tight = free.step(batch), bound.step(batch)
        if step == 1:
            assert loose.reference_kl == tight.reference_kl == pytest.approx(0, abs=1e-8)
    assert tight.reference_kl < 0.8 * loose.reference_kl


def test_half_precision_learns_about_the_same(qwen3: Path) -> None:
    full, half = (train(Learner(config(dtype=dtype), model_directory=qwen3), 3) for dtype in ("fp32", "bf16"))
    np.testing.assert_allclose(full, half, rtol=0.1)


def test_the_learning_rate_warms_up_and_decays() -> None:
    schedule = LearnerConfig(lr=1.0, lr_min=0.1, warmup_steps=2, decay_steps=5)
    assert [schedule.lr_at(step) for step in range(1, 8)] == pytest.approx(
        [0.5, 1.0, 0.7, 0.4, 0.1, 0.1, 0.1]
    )
    assert LearnerConfig(lr=1.0).lr_at(1_000_000) == 1.0


def test_a_step_uses_the_rate_of_its_place_in_the_schedule(qwen3: Path) -> None:
    learner = Learner(config(lr=1e-3, warmup_steps=4), model_directory=qwen3)
    rates = [take_step(learner, make_samples((9,)), step=step).lr for step in (1, 2, 3)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4])
