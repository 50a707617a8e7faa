"""The head against a linear layer followed by log_softmax: values, entropies, both gradients, precision and memory."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.learner import backend
from trainer.learner.logprobs import _add_product, _scaled_logits, head_logprobs

VOCAB, PADDED, WIDTH, ROWS, TEMPERATURE = 37, 40, 16, 8, 0.7


@dataclass
class Case:
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    factors: Tensor  # the loss is the log-probs weighted with these

    def observed(
        self, *, chunk_tokens: int = 3, fp32_logits: bool = False, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies, _ = self.outputs(
            chunk_tokens=chunk_tokens, fp32_logits=fp32_logits, entropy_gradient=entropy_gradient
        )
        return logprobs, entropies

    def outputs(
        self, *, chunk_tokens: int, fp32_logits: bool = False, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        return head_logprobs(
            self.hidden,
            self.weight,
            self.targets,
            temperature=TEMPERATURE,
            vocab_size=VOCAB,
            chunk_tokens=chunk_tokens,
            fp32_logits=fp32_logits,
            entropy_gradient=entropy_gradient,
            group=distributed.group.WORLD,
        )

    def expected(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        distribution = torch.log_softmax(logits[:, :VOCAB].float() / TEMPERATURE, dim=1)
        entropies = -(distribution.exp() * distribution).sum(1)
        return distribution.gather(1, self.targets[:, None])[:, 0], entropies

    def gradients(self, logprobs: Tensor, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad((logprobs * self.factors).sum(), inputs)


def make_case(dtype: torch.dtype = torch.float32, *, rows: int = ROWS) -> Case:
    generator = torch.Generator().manual_seed(0)
    place = {"device": backend.device(), "dtype": dtype}
    return Case(
        hidden=torch.randn(rows, WIDTH, generator=generator).to(**place).requires_grad_(),
        weight=torch.randn(PADDED, WIDTH, generator=generator).to(**place).requires_grad_(),
        targets=torch.randint(0, VOCAB, (rows,), generator=generator).to(backend.device()),
        factors=torch.randn(rows, generator=generator).to(backend.device()),
    )


@pytest.mark.parametrize("chunk_tokens", [3, 4, 100])
def test_logprobs_entropies_and_gradients_are_those_of_log_softmax(chunk_tokens: int) -> None:
    case = make_case()
    observed, entropies = case.observed(chunk_tokens=chunk_tokens)
    expected, wanted_entropies = case.expected(case.hidden @ case.weight.T)
    torch.testing.assert_close(observed, expected)
    torch.testing.assert_close(entropies, wanted_entropies)
    inputs = (case.hidden, case.weight)
    pairs = zip(case.gradients(observed, inputs), case.gradients(expected, inputs), strict=True)
    for gradient, wanted in pairs:
        torch.testing.assert_close(gradient, wanted)
    assert not case.gradients(case.observed()[0], inputs)[1][VOCAB:].any()


@pytest.mark.parametrize("chunk_tokens", [3, 4, 100])
def test_a_margin_is_how_far_a_target_is_below_the_most_likely_token(chunk_tokens: int) -> None:
    case = make_case()
    logits = (case.hidden @ case.weight.T)[:, :VOCAB].detach() / TEMPERATURE
    case.targets[::2] = logits.argmax(1)[::2]
    _, _, margins = case.outputs(chunk_tokens=chunk_tokens)
    assert not margins.requires_grad
    torch.testing.assert_close(margins, logits.gather(1, case.targets[:, None])[:, 0] - logits.amax(1))
    assert torch.equal(margins == 0, case.targets == logits.argmax(1))


@pytest.mark.parametrize("fp32_logits", [False, True])
@pytest.mark.parametrize("chunk_tokens", [3, 4, 100])
def test_the_gradient_of_entropies_and_logprobs_together_is_that_of_log_softmax(
    chunk_tokens: int, fp32_logits: bool
) -> None:
    case = make_case()
    observed = case.observed(chunk_tokens=chunk_tokens, fp32_logits=fp32_logits, entropy_gradient=True)
    expected = case.expected(case.hidden @ case.weight.T)
    inputs, others = (case.hidden, case.weight), case.factors.flip(0)
    for share in (0.0, 1.0):
        pairs = zip(
            *(
                torch.autograd.grad(
                    (share * logprobs * case.factors + entropies * others).sum(), inputs, retain_graph=True
                )
                for logprobs, entropies in (observed, expected)
            ),
            strict=True,
        )
        for gradient, wanted in pairs:
            torch.testing.assert_close(gradient, wanted)
    assert not torch.autograd.grad(observed[1].sum(), case.weight)[0][VOCAB:].any()


def test_entropies_have_a_gradient_only_where_it_is_asked_for() -> None:
    case = make_case()
    assert not case.observed()[1].requires_grad
    plain, both = case.observed()[0], case.observed(entropy_gradient=True)[0]
    inputs = (case.hidden, case.weight)
    for without, beside in zip(case.gradients(plain, inputs), case.gradients(both, inputs), strict=True):
        torch.testing.assert_close(without, beside)


def test_a_micro_batch_that_trains_nothing_has_gradients_of_zero() -> None:
    case = make_case(rows=0)
    observed, entropies = case.observed()
    assert observed.shape == entropies.shape == (0,)
    of_hidden, of_weight = case.gradients(observed, (case.hidden, case.weight))
    assert of_hidden.shape == (0, WIDTH)
    assert not of_weight.any()


def test_frozen_weights_get_no_gradient() -> None:
    case = make_case()
    case.weight.requires_grad_(False)
    (gradient,) = torch.autograd.grad(case.observed()[0].sum(), case.hidden)
    (wanted,) = torch.autograd.grad(case.expected(case.hidden @ case.weight.T)[0].sum(), case.hidden)
    torch.testing.assert_close(gradient, wanted)


def one_hot_case() -> Case:
    """The product of a one-hot row with the weights is a column of them: exact in half precision too."""
    case = make_case(torch.bfloat16)
    case.hidden = torch.eye(ROWS, WIDTH, device=backend.device(), dtype=torch.bfloat16).requires_grad_()
    case.weight = (case.weight * 3).detach().requires_grad_()
    return case


def test_the_softmax_of_half_precision_logits_is_computed_in_full_precision() -> None:
    """Values of bf16 have 8 bits: a softmax in it would be off by a hundred times this tolerance."""
    case = one_hot_case()
    observed, entropies = case.observed()
    assert observed.dtype == entropies.dtype == torch.float32
    full = (case.hidden.detach().float().requires_grad_(), case.weight.detach().float().requires_grad_())
    expected, wanted_entropies = case.expected(full[0] @ full[1].T)
    torch.testing.assert_close(observed, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies, wanted_entropies, rtol=1e-5, atol=1e-5)
    inputs = (case.hidden, case.weight)
    pairs = zip(case.gradients(observed, inputs), case.gradients(expected, full), strict=True)
    for gradient, wanted in pairs:
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(gradient.float(), wanted, rtol=2**-6, atol=2**-6)


def test_logits_in_fp32_are_those_of_the_same_weights_without_rounding() -> None:
    case = make_case(torch.bfloat16)
    rounded, exact = case.observed()[0], case.observed(fp32_logits=True)[0]
    expected, _ = case.expected(case.hidden.detach().float() @ case.weight.detach().float().T)
    torch.testing.assert_close(exact, expected, rtol=1e-5, atol=1e-5)
    assert (rounded - expected).abs().max() > 1e-3
    of_hidden, of_weight = case.gradients(exact, (case.hidden, case.weight))
    assert of_hidden.dtype == of_weight.dtype == torch.bfloat16


def test_the_weights_gradient_is_summed_over_chunks_in_full_precision() -> None:
    """In bf16 the sum would stop growing once each chunk's part is below half a unit in its last place."""
    rows = 1200
    case = make_case(torch.bfloat16, rows=rows)
    case.hidden = torch.ones_like(case.hidden).requires_grad_()
    (by_row,), (at_once,) = (
        torch.autograd.grad(case.observed(chunk_tokens=chunk_tokens)[0].sum(), case.weight)
        for chunk_tokens in (1, rows)
    )
    assert at_once.abs().max() > 30
    torch.testing.assert_close(by_row, at_once, rtol=2**-7, atol=0.05)


class OnGpu(Tensor):
    """Says that it is on a GPU. A product whose result has another type than its operands, which no CPU has, is first asked of torch by
    types and shapes alone, and then computed as torch documents it.
    """

    is_cuda = True

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "out_dtype" not in kwargs:
            return super().__torch_function__(func, types, args, kwargs)
        dtype, plain = kwargs["out_dtype"], [one.as_subclass(Tensor) for one in args]
        on_meta = {name: one.to("meta") if isinstance(one, Tensor) else one for name, one in kwargs.items()}
        described = func(*(one.to("meta") for one in plain), **on_meta)
        product = func(*(one.to(dtype) for one in plain))
        assert (described.dtype, described.shape) == (dtype, product.shape)
        return kwargs["out"].copy_(product) if "out" in kwargs else product


@pytest.mark.cpu_only
def test_products_of_half_precision_with_results_in_full_are_called_as_torch_has_them_on_a_gpu() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, gradient = (
        torch.randn(shape, generator=generator).bfloat16() for shape in ((8, 16), (37, 16), (8, 37))
    )
    total = torch.randn(37, 16, generator=generator)
    expected = total + gradient.float().T @ hidden.float()
    _add_product(total, gradient.as_subclass(OnGpu), hidden.as_subclass(OnGpu))
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)
    logits = _scaled_logits(
        hidden.as_subclass(OnGpu), weight.as_subclass(OnGpu), TEMPERATURE, fp32_logits=True
    )
    torch.testing.assert_close(
        logits.as_subclass(Tensor), hidden.float() @ weight.float().T / TEMPERATURE, rtol=1e-6, atol=1e-6
    )


class LargestTensor(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        returned = func(*args, **(kwargs or {}))
        for one in returned if isinstance(returned, tuple | list) else [returned]:
            if isinstance(one, Tensor):
                self.elements = max(self.elements, one.numel())
        return returned


def test_no_array_of_positions_by_vocabulary_ever_exists() -> None:
    case = make_case(rows=400)
    with LargestTensor() as largest:
        observed, _ = case.observed(chunk_tokens=5)
        case.gradients(observed, (case.hidden, case.weight))
    assert largest.elements == case.hidden.numel()
    with LargestTensor() as largest:
        case.observed(chunk_tokens=400)
    assert largest.elements == 400 * VOCAB
