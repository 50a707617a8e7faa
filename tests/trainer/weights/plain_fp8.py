"""SGLang's server on the CPU for weights in FP8: `python -m tests.trainer.weights.plain_fp8 FLAGS`, with the flags of `forked_server`.

Only the products are not SGLang's own, whose kernels need a GPU, or AMX. Here a layer multiplies the numbers that its weights and scales
are, in the type of its inputs. Everything else is: which layers are in FP8, what its loaders make of names and scales, and updates.
"""

import runpy
from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod, Fp8MoEMethod
from torch import Tensor


def numbers_of(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    rows, columns = weight.shape
    spread = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return (weight.float() * spread).to(dtype)


def multiply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    weight = numbers_of(layer.weight.data, layer.weight_scale_inv.data, x.dtype)
    return torch.nn.functional.linear(x, weight, bias)


class _Experts:
    """A layer of experts with the numbers of its weights in the type of its inputs."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        self._layer = layer
        for name in ("w13_weight", "w2_weight"):
            weights, scales = getattr(layer, name).data, getattr(layer, f"{name}_scale_inv").data
            each = [numbers_of(*pair, dtype) for pair in zip(weights, scales, strict=True)]
            setattr(self, name, torch.stack(each))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def multiply_experts(self: Any, layer: Any, dispatch_output: Any) -> StandardCombineInput:
    states, choice = dispatch_output.hidden_states, dispatch_output.topk_output
    experts = _Experts(layer, states.dtype)
    return StandardCombineInput(
        hidden_states=moe_forward_native(experts, states, choice, self.moe_runner_config)
    )


def configure(self: Any, layer: Any, moe_runner_config: Any) -> None:
    self.moe_runner_config = moe_runner_config


def keep(self: Any, layer: Any) -> None:
    """There is nothing to rearrange."""


if __name__ == "__main__":
    Fp8Config.get_supported_act_dtypes = classmethod(lambda cls: [torch.float32, torch.bfloat16])  # type: ignore[method-assign]
    Fp8LinearMethod.process_weights_after_loading = keep  # type: ignore[method-assign]
    Fp8LinearMethod.apply = multiply  # type: ignore[method-assign]
    Fp8MoEMethod.process_weights_after_loading = keep  # type: ignore[method-assign]
    Fp8MoEMethod.create_moe_runner = configure  # type: ignore[method-assign]
    Fp8MoEMethod.apply = multiply_experts  # type: ignore[method-assign]
    runpy.run_module("forked_server", run_name="__main__")
