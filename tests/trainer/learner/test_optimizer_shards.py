import itertools
import math

import pytest
import torch

from trainer.learner.optimizer import rectangles


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 2), (1, 5), (5, 1)])
def test_every_range_of_a_flattened_tensor_is_a_few_rectangles_in_its_order(shape: tuple[int, ...]) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    for begin, end in itertools.combinations(range(math.prod(shape) + 1), 2):
        found = list(rectangles(shape, begin, end))
        parts = [
            whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]
            for offsets, sizes in found
        ]
        assert torch.cat([part.flatten() for part in parts]).tolist() == list(range(begin, end))
        assert len(found) <= 2 * len(shape) - 1


def test_an_empty_range_has_no_rectangle() -> None:
    assert list(rectangles((3, 4), 5, 5)) == []
