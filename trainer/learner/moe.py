"""Mixture of experts: what Megatron is told about it, and how its weights are divided.

The router and everything outside the experts are divided like a dense model. Each expert is whole on the rank that holds it,
also under tensor parallelism, and tokens travel to their experts by an all-to-all. Nothing balances the load: an auxiliary
loss would train the policy for something else than its reward.
"""

from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP

from trainer.learner.architecture import Experts

if not hasattr(moe_utils, "te_general_gemm"):
    # megatron-core 0.16.1 asks whether this is None, and leaves it undefined where TransformerEngine is absent.
    moe_utils.te_general_gemm = None  # pyright: ignore[reportAttributeAccessIssue]


def expert_options(experts: Experts | None, *, expert_parallel: int) -> dict[str, Any]:
    """Keyword arguments of Megatron's TransformerConfig; none for a dense model.

    The router computes in fp32. Where the weights of the chosen experts are scaled to a sum of 1, a softmax over the chosen
    alone is the same as one over all, scaled.
    """
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.width,
        "moe_router_topk": experts.per_token,
        "moe_router_pre_softmax": not experts.renormalised,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "expert_model_parallel_size": expert_parallel,
        "expert_tensor_parallel_size": 1,
    }


def mark_experts(model: GPTModel) -> None:
    """Tell Megatron that the copies of an expert lie on other ranks than the copies of other weights.

    It marks the experts itself, but only if they are divided. An unmarked expert that is whole on every rank would have its
    gradient summed over the data-parallel ranks alone, and not over the tensor-parallel ones, whose tokens differ too.
    """
    for module in model.modules():
        if isinstance(module, SequentialMLP):
            for parameter in module.parameters():
                parameter.allreduce = False  # pyright: ignore[reportAttributeAccessIssue] - Megatron's mark
