"""One process group for all tests here, and tiny models on disk."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.small_models import EXPERTS, write_model
from trainer.learner import backend


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """This process is the whole learner; one thread, for the machine is shared with other tests."""
    torch.set_num_threads(1)
    backend.join()
    yield
    backend.leave()


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3"), "qwen3", head_dim=16)


@pytest.fixture(scope="session")
def tied_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"), "llama", tie_word_embeddings=True)


@pytest.fixture(scope="session")
def biased_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen2"), "qwen2")


@pytest.fixture(scope="session")
def qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe", norm_topk_prob=True, **EXPERTS)
