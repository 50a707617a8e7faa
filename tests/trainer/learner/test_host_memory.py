from types import SimpleNamespace

import pytest
import torch

from trainer.learner import backend
from trainer.learner.snapshots import HostTensors

TENSORS = [torch.randn(3, 5), torch.randn(33).bfloat16(), torch.arange(7)]


def test_copies_have_the_content_of_that_moment_and_share_no_storage() -> None:
    """torch.save writes the whole storage that a tensor is a view of."""
    originals = [tensor.clone() for tensor in TENSORS]
    copies = HostTensors.of(originals)
    for original in originals:
        original.zero_()
    for copy, tensor in zip(copies.tensors, TENSORS, strict=True):
        assert torch.equal(copy, tensor)
        assert copy.untyped_storage().nbytes() == tensor.nbytes


def test_the_memory_of_a_dropped_set_is_used_by_the_next_of_its_size_and_by_no_set_before() -> None:
    first, second = HostTensors.of(TENSORS), HostTensors.of(TENSORS)
    places = [held.tensors[0].data_ptr() for held in (first, second)]
    assert len(set(places)) == 2
    del first
    assert HostTensors.of(TENSORS).tensors[0].data_ptr() == places[0]
    assert torch.equal(second.tensors[0], TENSORS[0])


def test_with_cuda_exactly_the_memory_of_a_set_is_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's allocator would take 2,048 and 128 bytes for these."""
    locked: list[tuple[int, int]] = []

    def register(place: int, num_bytes: int, _flags: int) -> int:
        locked.append((place, num_bytes))
        return 0

    monkeypatch.setattr(backend, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(torch.cuda, "check_error", lambda status: None)
    tensors = HostTensors([torch.empty(1088 // 4), torch.empty(66, dtype=torch.uint8)]).tensors
    assert locked == [(tensors[0].data_ptr(), 1088 + 128)]
