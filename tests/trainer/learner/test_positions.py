"""Dividing the positions of a micro-batch, and the angles of positions, also of those that half precision cannot tell apart."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from tests.trainer.learner.tiny import config, make_samples, read_reference, trained_throughout
from trainer.batching.batch import Sample
from trainer.batching.packing import MicroBatch, pack
from trainer.learner import backend, forward
from trainer.learner.architecture import Architecture, Yarn
from trainer.learner.attention import PackedAttention, Positions, Rotary, RotaryAttention, rotated
from trainer.learner.families.registry import read_architecture
from trainer.learner.megatron import Learner
from trainer.learner.model import transformer_config

FAR = 32_000
"""Where bf16 knows positions to the nearest 128 only."""


@pytest.fixture
def architecture(qwen3: Path) -> Architecture:
    return read_architecture(qwen3)


@pytest.fixture
def positions(architecture: Architecture) -> Positions:
    """Of one rank, as if four tensor-parallel ones divided its activations."""
    backend.lay_out(tensor_parallel=1, pipeline_parallel=1)
    return Positions(config(tensor_parallel=4, sequence_parallel=True), Rotary(architecture))


def test_positions_that_are_appended_are_a_sample_of_their_own(positions: Positions) -> None:
    (microbatch,) = pack(make_samples((7, 4)), max_tokens=64)
    assert microbatch.num_positions == 9
    packing = positions.packing(microbatch)
    assert packing.cu_seqlens_q.tolist() == [0, 6, 9, 12]
    assert packing.max_seqlen_q == 6
    inputs = positions.mine(microbatch.inputs_P).tolist()
    assert inputs[:9] == microbatch.inputs_P.tolist()
    assert inputs[9:] == [0, 0, 0]


def test_joined_values_are_those_of_the_micro_batch_alone(positions: Positions) -> None:
    with backend.device_scope():
        values = positions.joined(torch.arange(12.0), num_positions=9)
    assert values.tolist() == list(range(9))


def test_positions_that_need_no_padding_get_none(positions: Positions) -> None:
    (microbatch,) = pack(make_samples((5, 5)), max_tokens=64)
    assert positions.packing(microbatch).cu_seqlens_q.tolist() == [0, 4, 8]


@pytest.mark.parametrize("yarn", [None, Yarn(factor=4.0, original_positions=32)])
def test_the_angle_between_two_positions_depends_on_their_distance_alone(
    architecture: Architecture, yarn: Yarn | None
) -> None:
    rotary = Rotary(msgspec.structs.replace(architecture, rope_scaling=yarn))
    generator = torch.Generator().manual_seed(3)
    query, key = (torch.randn(1, 1, architecture.head_width, generator=generator) for _ in "qk")

    def score(at: int, of: int) -> float:
        turned = [
            rotated(vector, *rotary.angles(torch.tensor([position])))
            for vector, position in ((query, at), (key, of))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(40, 30) == pytest.approx(score(15, 5), rel=1e-4)
    assert abs(score(40, 30) - score(40, 20)) > 1e-2


def test_yarn_leaves_fast_dimensions_and_slows_the_slowest_by_its_factor(architecture: Architecture) -> None:
    yarn = Yarn(factor=4.0, original_positions=4096)
    wide = msgspec.structs.replace(architecture, head_width=128, rope_theta=1e6)
    plain, stretched = (
        torch.atan2(sines, cosines)[0, 0, :64]
        for cosines, sines in (
            Rotary(msgspec.structs.replace(wide, rope_scaling=y)).angles(torch.tensor([1])) for y in (None, yarn)
        )
    )
    ratios = (plain / stretched).numpy()
    np.testing.assert_allclose(ratios[:8], 1.0, rtol=1e-4)
    np.testing.assert_allclose(ratios[-8:], 4.0, rtol=1e-3)
    assert (np.diff(ratios) > -1e-3).all()


def test_angles_of_far_positions_are_those_of_exact_arithmetic(architecture: Architecture) -> None:
    """Against the formula in fp64; fp32 is off by a few thousandths of a radian there."""
    long = msgspec.structs.replace(architecture, head_width=128, rope_theta=1e6)
    positions = torch.tensor([0, 1, 257, 4097, FAR - 1, FAR])
    cosines, sines = (values[:, 0].double() for values in Rotary(long).angles(positions))
    exact = torch.from_numpy(np.outer(positions.numpy(), 1e6 ** -(np.arange(64) / 64))).repeat(1, 2)
    torch.testing.assert_close(cosines, exact.cos(), rtol=0, atol=5e-3)
    torch.testing.assert_close(sines, exact.sin(), rtol=0, atol=5e-3)


def test_half_precision_queries_are_turned_in_full_precision_at_every_position_of_a_long_sample(
    qwen3: Path, architecture: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers turns them in fp32, and rounded once."""
    (microbatch,) = pack(make_samples((FAR + 1,)), max_tokens=FAR)
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(FAR, 1, architecture.head_width, generator=generator).bfloat16()
    observed = turned(architecture, microbatch, query, monkeypatch)

    wide = query.float().transpose(0, 1)[None]
    angles = Qwen3RotaryEmbedding(Qwen3Config.from_pretrained(qwen3))(wide, torch.arange(FAR)[None])
    expected = apply_rotary_pos_emb(wide, wide, *angles)[0][0].transpose(0, 1).bfloat16()
    assert observed.dtype == torch.bfloat16
    differ = (observed != expected).float().mean().item()
    assert differ < 1e-3, (
        "what lies between two numbers may be rounded to either, and half of all would be off in bf16"
    )


def turned(
    architecture: Architecture, microbatch: MicroBatch, query: Tensor, monkeypatch: pytest.MonkeyPatch
) -> Tensor:
    """What our attention makes of queries before it attends."""
    backend.lay_out(tensor_parallel=1, pipeline_parallel=1)
    options = config(dtype="bf16", micro_batch_tokens=FAR)
    vectors = query.to(backend.device())
    monkeypatch.setattr(PackedAttention, "forward", lambda _self, query, key, *_: (query, key))
    with backend.device_scope():
        packing = Positions(options, Rotary(architecture)).packing(microbatch)
        shape = transformer_config(architecture, options)
        attention = RotaryAttention(
            shape, 1, AttnMaskType.causal, attention_type="self", architecture=architecture
        )
        queries, keys = attention(vectors, vectors, vectors, None, packing)
    assert torch.equal(queries, keys), "keys are turned as queries are"
    return queries.cpu()


def test_logprobs_of_half_precision_are_as_near_to_the_reference_at_far_positions_as_at_near_ones(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = trained_throughout(make_samples())
    learner = Learner(config(dtype="bf16"), model_directory=qwen3)
    gaps = {}
    for start in (0, FAR):

        def shifted(samples: Sequence[Sample], *, max_tokens: int, start: int = start) -> list[MicroBatch]:
            """Every sample begins at position `start`."""
            return [
                replace(one, positions_P=one.positions_P + start)
                for one in pack(samples, max_tokens=max_tokens)
            ]

        monkeypatch.setattr(forward, "pack", shifted)
        observed = np.concatenate([values[1:] for values in learner.logprobs(samples, 1.0)])
        gaps[start] = np.abs(observed - far_reference(qwen3, samples, start)).mean()
    assert gaps[FAR] < 1.5 * gaps[0]
    still = far_reference(qwen3, samples, 0, stride=0)
    assert np.abs(observed - still).mean() > 5 * gaps[0], "a model that knows no positions would be noticed"


def far_reference(directory: Path, samples: Sequence[Sample], start: int, *, stride: int = 1) -> np.ndarray:
    """Log-probs of all tokens but the first of each sample, by transformers in fp32, from position `start` on."""
    model, found = read_reference(directory), []
    for sample in samples:
        tokens = torch.from_numpy(sample.tokens_T).long()[None]
        places = start + stride * torch.arange(sample.num_tokens)[None]
        logprobs = torch.log_softmax(model(tokens, position_ids=places).logits[0, :-1], dim=-1)
        found.append(logprobs.gather(1, tokens[0, 1:, None])[:, 0].detach())
    return torch.cat(found).numpy()
