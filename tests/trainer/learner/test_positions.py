"""Dividing the positions of a micro-batch, and the angles of positions."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tests.trainer.learner.tiny import config, make_samples
from trainer.batching.packing import pack
from trainer.learner import backend
from trainer.learner.architecture import Architecture, Yarn, read_architecture
from trainer.learner.positions import Positions
from trainer.learner.rotary import Rotary, rotated


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
    rotary = Rotary(msgspec.structs.replace(architecture, yarn=yarn))
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
            Rotary(msgspec.structs.replace(wide, yarn=y)).angles(torch.tensor([1])) for y in (None, yarn)
        )
    )
    ratios = (plain / stretched).numpy()
    np.testing.assert_allclose(ratios[:8], 1.0, rtol=1e-4)
    np.testing.assert_allclose(ratios[-8:], 4.0, rtol=1e-3)
    assert (np.diff(ratios) > -1e-3).all()
