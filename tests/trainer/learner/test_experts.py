"""The experts of a process in one product, as on a GPU, against a product for each; torch has a loop in place of the kernel on a CPU."""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.func import functional_call

from benchmarks.small_models import GPT_OSS, write_model
from tests.trainer.learner.tiny import (
    assert_same_run,
    config,
    gradients,
    make_samples,
    read_export,
    relative_difference,
    routed,
    take_step,
    train,
)
from trainer.learner import backend, experts
from trainer.learner.config import LoraConfig
from trainer.learner.experts import GroupedProducts, LoopedProducts, products
from trainer.learner.families.registry import read_architecture
from trainer.learner.megatron import Learner

Grouping = Callable[[], None]


@pytest.fixture
def grouping(monkeypatch: pytest.MonkeyPatch) -> Grouping:
    """Called, it makes this device take the form of a GPU."""
    return lambda: monkeypatch.setattr(experts, "has_grouped_products", lambda _rows: True)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gpt_oss"), "gpt_oss", **GPT_OSS)


@pytest.fixture(params=["qwen3_moe", "gpt_oss"])
def mixture(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def device_for(dtype: torch.dtype) -> torch.device:
    """A GPU has the kernel for bf16 alone."""
    return backend.device() if dtype == torch.bfloat16 else torch.device("cpu")


def results_and_gradients(form: Any, counts: list[int], dtype: torch.dtype) -> list[Tensor]:
    """Of two products with biases, as experts have them, and of everything that goes into them."""
    torch.manual_seed(5)

    def made(*sizes: int) -> Tensor:
        return torch.randn(*sizes).to(device_for(dtype), dtype).requires_grad_()

    rows, shares = made(sum(counts), 16), made(sum(counts), 1)
    first, second = [made(24, 16) for _ in counts], [made(16, 24) for _ in counts]
    biases, last = [made(24) for _ in counts], [made(16) for _ in counts]
    inputs = [rows, shares, *first, *second, *biases, *last]
    inner = form.by_weights(rows, first) + form.spread(biases)
    outputs = form.by_weights(inner.tanh(), second) + form.spread(last, shares)
    (outputs * torch.linspace(-1, 1, 16, device=outputs.device)).sum().backward()
    return [outputs, *(one.grad for one in inputs if one.grad is not None)]


@pytest.mark.parametrize("counts", [[3, 1, 7, 5], [4, 0, 0, 8], [0, 0, 16, 0], [0, 9, 0, 0], [1, 1, 1, 1]])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 2e-2)])
def test_one_product_for_all_experts_gives_what_one_for_each_gives(
    counts: list[int], dtype: torch.dtype, tolerance: float
) -> None:
    looped = results_and_gradients(LoopedProducts(counts), counts, dtype)
    ends = GroupedProducts(torch.tensor(counts, device=device_for(dtype)), sum(counts))
    grouped = results_and_gradients(ends, counts, dtype)
    assert len(looped) == len(grouped) == 1 + 2 + 4 * len(counts)
    for one, other in zip(looped, grouped, strict=True):
        scale = max(float(one.detach().abs().max()), 1e-3)
        torch.testing.assert_close(other / scale, one / scale, rtol=0, atol=tolerance)


def test_no_row_or_a_width_that_a_kernel_does_not_take_leaves_one_product_for_each(
    grouping: Grouping,
) -> None:
    grouping()
    counts = torch.tensor([2, 0, 1])
    assert isinstance(products(torch.zeros(3, 16), counts, (16, 24)), GroupedProducts)
    assert isinstance(products(torch.zeros(3, 16), counts, (16, 23)), LoopedProducts)
    none = products(torch.zeros(0, 16), counts * 0, (16, 24))
    assert none.by_weights(torch.zeros(0, 16), [torch.ones(24, 16)] * 3).shape == (0, 24)


@pytest.mark.cpu_only
@pytest.mark.parametrize("chosen", ["by the router", "all the same"])
def test_a_step_with_all_experts_in_one_product_has_the_gradients_of_one_for_each(
    mixture: Path, grouping: Grouping, chosen: str
) -> None:
    """All the same: five of the eight experts get no token."""
    samples = make_samples()
    replay = chosen == "all the same"
    if replay:
        samples = tuple(
            replace(one, routing=np.full_like(one.routing, 0) + np.arange(len(one.routing)) % 3)
            for one in routed(samples, read_architecture(mixture))
            if one.routing is not None
        )
        samples = tuple(replace(one, routing=one.routing.astype(np.uint8)) for one in samples)
    learners = [Learner(config(routing_replay=replay), model_directory=mixture) for _ in range(2)]
    looped = learners[0].logprobs(samples, 1.0)
    take_step(learners[0], samples)
    grouping()
    for one, other in zip(looped, learners[1].logprobs(samples, 1.0), strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5)
    take_step(learners[1], samples)
    assert relative_difference(*learners) < 1e-5
    without = [
        name
        for name, gradient in gradients(learners[1]).items()
        if ".local_experts." in name and not gradient.any()
    ]
    assert bool(without) == replay


@pytest.mark.cpu_only
def test_adapters_of_all_experts_in_one_product_have_the_gradients_of_one_for_each(
    qwen3_moe: Path, grouping: Grouping
) -> None:
    options = config(lora=LoraConfig(rank=4, alpha=8), lr=1e-2)
    learners = [Learner(options, model_directory=qwen3_moe) for _ in range(2)]
    train(learners[0], 2)
    grouping()
    train(learners[1], 2)
    assert relative_difference(*learners) < 1e-5
    assert all(
        gradient.any() for name, gradient in gradients(learners[1]).items() if ".local_experts." in name
    )


@pytest.mark.cpu_only
def test_a_run_with_all_experts_in_one_product_resumes_bit_for_bit_and_exports_what_it_read(
    mixture: Path, grouping: Grouping, tmp_path: Path
) -> None:
    grouping()
    learner = Learner(config(recompute="selective"), model_directory=mixture)
    learner.export(tmp_path / "untrained")
    before, after = read_export(mixture), read_export(tmp_path / "untrained")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name].to(before[name].dtype)) for name in before)
    train(learner, 2)
    learner.save(tmp_path / "checkpoint", b"")
    expected = train(learner, 2)
    resumed = Learner(config(recompute="selective"), model_directory=mixture)
    resumed.restore(tmp_path / "checkpoint")
    assert_same_run(train(resumed, 2), expected)


@pytest.mark.cpu_only
def test_a_checkpoint_has_no_form_of_the_products(
    qwen3_moe: Path, grouping: Grouping, tmp_path: Path
) -> None:
    """One that was written where experts are computed one after another goes on where they are one product."""
    looped = Learner(config(), model_directory=qwen3_moe)
    train(looped, 2)
    looped.save(tmp_path / "checkpoint", b"")
    expected = train(looped, 1)
    grouping()
    grouped = Learner(config(), model_directory=qwen3_moe)
    grouped.restore(tmp_path / "checkpoint")
    np.testing.assert_allclose(train(grouped, 1), expected, rtol=1e-5)


@pytest.mark.cpu_only
@pytest.mark.parametrize("form", ["one product", "one for each"])
def test_the_host_waits_for_no_number_where_one_process_has_all_experts(
    mixture: Path, grouping: Grouping, form: str
) -> None:
    """Fake tensors have shapes and no numbers, so that whatever needs a number fails."""
    learner = Learner(config(dtype="bf16"), model_directory=mixture)
    layer = next(module for module in learner._model.modules() if isinstance(module, MoELayer))
    with FakeTensorMode() as mode, backend.device_scope():
        numberless = {
            name: mode.from_tensor(one)
            for name, one in chain(layer.named_parameters(), layer.named_buffers())
        }
        tokens = torch.zeros(40, 1, 64, dtype=torch.bfloat16, requires_grad=True)
        if form == "one product":
            grouping()
            results, _ = functional_call(layer, numberless, (tokens,))
            of_tokens, *of_weights = torch.autograd.grad(
                results.float().sum(), [tokens, *(one for one in numberless.values() if one.requires_grad)]
            )
            assert of_tokens.shape == tokens.shape
            assert len(of_weights) > 2 * 8
        else:
            with pytest.raises(DataDependentOutputException):
                functional_call(layer, numberless, (tokens,))


def test_a_report_that_names_an_expert_twice_sends_the_token_there_once(qwen3_moe: Path) -> None:
    """The two others of the token's three experts are one, so the results are those of a report in which its copy has no weight."""
    samples = routed(make_samples((9, 12)), read_architecture(qwen3_moe))
    assert samples[0].routing is not None
    twice = samples[0].routing.reshape(-1, 3).copy()
    twice[4, 2] = twice[4, 1]
    learner = Learner(config(routing_replay=True), model_directory=qwen3_moe)
    observed = learner.logprobs((replace(samples[0], routing=twice.ravel()), samples[1]), 1.0)
    expected = learner.logprobs(samples, 1.0)
    assert np.isfinite(observed[0]).all()
    np.testing.assert_allclose(observed[0][:3], expected[0][:3], atol=1e-6)  # earlier tokens do not see it
    np.testing.assert_allclose(observed[1], expected[1], atol=1e-6)
    assert np.abs(observed[0] - expected[0]).max() > 1e-3


def test_in_bf16_the_form_of_this_device_has_the_log_probs_of_fp32_but_for_rounding(mixture: Path) -> None:
    samples = make_samples()
    exact, rounded = (
        Learner(config(dtype=dtype, lr=1e-4), model_directory=mixture) for dtype in ("fp32", "bf16")
    )
    for one, other in zip(exact.logprobs(samples, 1.0), rounded.logprobs(samples, 1.0), strict=True):
        assert np.abs(one - other).mean() < 0.1 * np.abs(one).mean()
    assert np.isfinite(take_step(rounded, samples).grad_norm)
