"""Host memory that no GPU reads need not be pinned, and without a GPU torch refuses to pin it. SGLang's adapters (LoRA) always ask for it;
here they get ordinary memory, which has the same content.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

MAKERS = ("tensor", "zeros", "empty", "arange")
"""The functions of torch that SGLang asks for pinned memory when it loads or applies adapters."""


def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`make` without its argument `pin_memory`."""

    @functools.wraps(make)
    def made(*values: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return make(*values, **options)

    return made


def install() -> None:
    for name in MAKERS:
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
