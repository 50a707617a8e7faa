"""Packing in bf16, the precision of a GPU: on one it runs with the GPU's attention kernel, on other machines with the CPU's."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from benchmarks.small_models import DELTA_NET, write_model
from tests.trainer.learner.tiny import (
    config,
    gradients,
    make_samples,
    read_export,
    take_step,
    train,
    trained_throughout,
)
from trainer.batching.batch import Sample
from trainer.learner import export
from trainer.learner.megatron import Learner

ROUNDING = 0.05
"""Nats. bf16 has 8 bits; kernels that add in another order differ in the last ones."""


def mean_difference(left: list[npt.NDArray[np.float32]], right: list[npt.NDArray[np.float32]]) -> float:
    return float(np.abs(np.concatenate(left) - np.concatenate(right)).mean())


def test_packed_samples_have_the_logprobs_that_each_has_by_itself(qwen3: Path) -> None:
    learner, samples = (
        Learner(config(dtype="bf16", micro_batch_tokens=128), model_directory=qwen3),
        trained_throughout(make_samples()),
    )
    packed = learner.logprobs(samples, 1.0)
    alone = [learner.logprobs([sample], 1.0)[0] for sample in samples]
    assert mean_difference(packed, alone) < ROUNDING


def test_samples_run_together_without_a_boundary_would_be_noticed(qwen3: Path) -> None:
    """The control: the same tokens as one sample, so that each attends to those before it."""
    learner, samples = (
        Learner(config(dtype="bf16", micro_batch_tokens=128), model_directory=qwen3),
        trained_throughout(make_samples()),
    )
    alone = [learner.logprobs([sample], 1.0)[0] for sample in samples]
    ends = np.cumsum([sample.num_tokens for sample in samples])[:-1]
    together = np.split(learner.logprobs([joined(samples)], 1.0)[0], ends)
    assert mean_difference([one[1:] for one in together], [one[1:] for one in alone]) > 4 * ROUNDING


def test_gradients_of_half_precision_weights_are_summed_in_full_precision(qwen3: Path) -> None:
    """Sums of several micro-batches and processes, most of which bf16 could not hold."""
    learner = Learner(config(dtype="bf16", micro_batch_tokens=40, clip_grad=0.0), model_directory=qwen3)
    assert take_step(learner, make_samples()).num_microbatches > 1
    for name, gradient in gradients(learner).items():
        assert gradient.dtype == torch.float32
        assert not torch.equal(gradient, gradient.bfloat16().float()), name


@pytest.mark.cpu_only
@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_decays_of_linear_attention_keep_full_precision_beside_weights_of_half(
    tmp_path: Path, distributed_optimizer: bool
) -> None:
    directory = write_model(tmp_path / "model", "qwen3_5_text", **DELTA_NET)
    chosen = config(dtype="bf16", distributed_optimizer=distributed_optimizer)
    learner = Learner(chosen, model_directory=directory)
    learner.export(tmp_path / "exported")
    published, exported = read_export(directory), read_export(tmp_path / "exported")
    whole = {name for name in published if name.endswith(("A_log", "linear_attn.norm.weight"))}
    assert {name for name, tensor in exported.items() if tensor.dtype == torch.float32} == whole
    assert all(torch.equal(exported[name], published[name]) for name in whole)
    train(learner, 2)
    learner.save(tmp_path / "checkpoint", b"")
    losses = train(learner, 2)
    resumed = Learner(chosen, model_directory=directory)
    resumed.restore(tmp_path / "checkpoint")
    assert train(resumed, 2) == losses
    pairs = zip(learner._model.parameters(), resumed._model.parameters(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)


def test_a_conversion_in_half_precision_keeps_the_decays(tmp_path: Path) -> None:
    directory, half = write_model(tmp_path / "model", "qwen3_5_text", **DELTA_NET), config(dtype="bf16")
    export.to_checkpoint(directory, tmp_path / "checkpoint", half)
    export.to_hugging_face(tmp_path / "checkpoint", tmp_path / "back", half, model_directory=directory)
    published, back = read_export(directory), read_export(tmp_path / "back")
    for name, tensor in published.items():
        is_whole = name.endswith(("A_log", "linear_attn.norm.weight"))
        assert torch.equal(back[name], tensor if is_whole else tensor.bfloat16()), name


def joined(samples: tuple[Sample, ...]) -> Sample:
    """One sample of the tokens of all."""
    arrays = ("tokens_T", "trained_T", "behaviour_logprobs_T", "advantages_T", "versions_T")
    return replace(
        samples[0], **{name: np.concatenate([getattr(s, name) for s in samples]) for name in arrays}
    )
