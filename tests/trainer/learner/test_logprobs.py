import pytest
import torch
from torch import distributed

from trainer.learner import backend, logprobs
from trainer.learner.logprobs import vocab_parallel_logprobs

VOCAB, PADDED, TEMPERATURE = 37, 40, 0.7


@pytest.fixture(params=[1 << 26, 3 * PADDED], ids=["one chunk", "three rows a chunk"])
def chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", request.param)


@pytest.mark.usefixtures("chunked")
def test_logprobs_entropies_and_gradient_are_those_of_log_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(8, PADDED, generator=generator) * 3).to(backend.device()).requires_grad_()
    targets = torch.randint(0, VOCAB, (8,), generator=generator).to(backend.device())
    weights = torch.randn(8, generator=generator).to(backend.device())
    observed, entropies = vocab_parallel_logprobs(
        logits, targets, temperature=TEMPERATURE, vocab_size=VOCAB, group=distributed.group.WORLD
    )
    distribution = torch.log_softmax(logits[:, :VOCAB] / TEMPERATURE, dim=1)
    expected = distribution.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(observed, expected)
    torch.testing.assert_close(entropies, -(distribution.exp() * distribution).sum(1).detach())
    (gradient,) = torch.autograd.grad((observed * weights).sum(), logits)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), logits)
    torch.testing.assert_close(gradient, wanted)
    assert not gradient[:, VOCAB:].any()


@pytest.mark.usefixtures("chunked")
def test_half_precision_logits_are_computed_with_in_full_precision() -> None:
    """Values of bf16 have 8 bits: a softmax in it would be off by a hundred times this tolerance."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(8, PADDED, generator=generator) * 3).to(backend.device(), torch.bfloat16)
    logits.requires_grad_()
    targets = torch.randint(0, VOCAB, (8,), generator=generator).to(backend.device())
    observed, entropies = vocab_parallel_logprobs(
        logits, targets, temperature=TEMPERATURE, vocab_size=VOCAB, group=distributed.group.WORLD
    )
    assert observed.dtype == entropies.dtype == torch.float32
    full = logits.detach().float().requires_grad_()
    distribution = torch.log_softmax(full[:, :VOCAB] / TEMPERATURE, dim=1)
    expected = distribution.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(observed, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        entropies, -(distribution.exp() * distribution).sum(1).detach(), rtol=1e-5, atol=1e-5
    )
    (gradient,) = torch.autograd.grad(observed.sum(), logits)
    (wanted,) = torch.autograd.grad(expected.sum(), full)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient.float(), wanted.bfloat16().float(), rtol=2**-8, atol=1e-6)


def test_logits_are_left_as_they_were() -> None:
    logits = torch.randn(4, VOCAB, device=backend.device())
    before = logits.clone()
    targets = torch.zeros(4, dtype=torch.int64, device=backend.device())
    vocab_parallel_logprobs(logits, targets, temperature=1.0, vocab_size=VOCAB, group=distributed.group.WORLD)
    assert torch.equal(logits, before)
