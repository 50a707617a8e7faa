"""The gated delta net, a layer's linear attention, in the place of Megatron's attention. Megatron's own needs kernels of a GPU.

One projection gives each key head its query, key and values, a gate for each value, and a strength and a decay for each value head. A short
convolution passes over queries, keys and values, then the delta rule (`delta_rule.py`), a norm of each value head, and the gate.

What belongs to a key head stays together, so tensor-parallel ranks divide the key heads. With context parallelism an all-to-all gives each
rank all positions of a part of its key heads, and another returns the result, as in `attention.py`: states pass through whole samples.

Between the passes only what the projections return and take is kept. The backward pass computes the rest again, because that is several
times as large, the states of all chunks above all.

Shape suffixes: L positions of this rank, P positions of the micro-batch, G key heads of this rank, R value heads of a key head, V width
of a value, E width of the model.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    all_to_all_hp2sp,
    all_to_all_sp2hp,
    copy_to_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.learner import backend
from trainer.learner.architecture import Architecture
from trainer.learner.attention import Packing
from trainer.learner.delta_rule import causal_convolution, gated_delta_rule

DIVIDED = ("conv_weight", "decay_log", "decay_bias")
"""The parameters, besides the projections, of which each tensor-parallel rank has those of its heads."""

IN_FP32 = ("decay_log", "norm_weight")
"""The parameters that are in fp32 whatever the type of the others is, as in the published weights of Qwen3.5: a decay acts over thousands
of positions, and bf16 would change its logarithm by up to a 256th.
"""


class GatedDeltaNet(MegatronModule):
    """Megatron's interface of a layer's attention, over packed samples."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        architecture: Architecture,
        pg_collection: ProcessGroupCollection,
        **_unused: Any,
    ) -> None:
        super().__init__(config=config)
        assert architecture.delta_net is not None
        self._shape = shape = architecture.delta_net
        self._eps = architecture.norm_eps
        self._parts = config.context_parallel_size
        heads = shape.num_key_heads // config.tensor_model_parallel_size
        values = shape.num_value_heads // config.tensor_model_parallel_size
        width, num_values = architecture.width, shape.num_value_heads * shape.value_width
        options: dict[str, Any] = {
            "config": config,
            "init_method": None,  # weights are read
            "bias": False,
            "tp_group": pg_collection.tp,
        }
        self.in_proj = ColumnParallelLinear(
            width, shape.num_key_heads * shape.group_width, gather_output=False, **options
        )
        self.conv_weight = nn.Parameter(torch.empty(heads * shape.convolved_width, 1, shape.kernel))
        self.decay_log = nn.Parameter(torch.empty(values))
        self.decay_bias = nn.Parameter(torch.empty(values))
        self.norm_weight = nn.Parameter(torch.empty(shape.value_width))
        self.out_proj = RowParallelLinear(
            num_values, width, input_is_parallel=True, skip_bias_add=True, **options
        )
        for name in DIVIDED:
            set_tensor_model_parallel_attributes(self.get_parameter(name), is_parallel=True, dim=0, stride=1)

    def forward(
        self, hidden_L1E: Tensor, attention_mask: None, packed_seq_params: Packing, **_unused: Any
    ) -> tuple[Tensor, None]:
        projected_L1, _ = self.in_proj(hidden_L1E)
        projected = projected_L1[:, 0]
        if self._parts > 1:
            projected = all_to_all_sp2hp(projected, group=backend.context_parallel_group())
        found = checkpoint(
            self._attend,
            projected,
            packed_seq_params.boundaries,
            use_reentrant=False,
            preserve_rng_state=False,  # nothing there is random
        )
        assert isinstance(found, Tensor)
        if self._parts > 1:
            found = all_to_all_hp2sp(found, group=backend.context_parallel_group())
        output_L1E, _ = self.out_proj(found[:, None])
        return output_L1E, None

    def _attend(self, projected: Tensor, boundaries: list[int]) -> Tensor:
        """The gated values of this rank's heads at all positions, P x (G * R * V)."""
        shape = self._shape
        per_key, key_width, value_width = shape.values_per_key, shape.key_width, shape.value_width
        mixed, gate, strength_PGR, decay_PGR = projected.unflatten(1, (-1, shape.group_width)).split(
            [shape.convolved_width, per_key * value_width, per_key, per_key], dim=2
        )
        convolved = causal_convolution(mixed.flatten(1), self._mine(self.conv_weight), boundaries)
        query_PGK, key_PGK, values = (
            F.silu(convolved)
            .unflatten(1, (-1, shape.convolved_width))
            .split([key_width, key_width, per_key * value_width], dim=2)
        )
        rate_GR, bias_GR = (
            self._mine(one).float().view(-1, per_key) for one in (self.decay_log, self.decay_bias)
        )
        found_PGRV = gated_delta_rule(
            query_PGK,
            key_PGK,
            values.unflatten(2, (per_key, value_width)),
            -rate_GR.exp() * F.softplus(decay_PGR.float() + bias_GR),
            strength_PGR.float().sigmoid(),
            boundaries,
        )
        # Each tensor-parallel rank has other heads, so its gradient of this weight is a part of a sum.
        weight_V = copy_to_tensor_model_parallel_region(self.norm_weight)
        scales = torch.rsqrt(found_PGRV.square().mean(-1, keepdim=True) + self._eps)
        normed_PGRV = found_PGRV * scales * weight_V
        gated_PGRV = normed_PGRV * F.silu(gate.float()).unflatten(2, (per_key, value_width))
        return gated_PGRV.flatten(1).to(projected.dtype)

    def _mine(self, parameter: Tensor) -> Tensor:
        """The part for the heads that this rank works on: with context parallelism, some of those of the tensor-parallel rank."""
        return parameter.chunk(self._parts)[parallel_state.get_context_parallel_rank()]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The parameters in checkpoints that other layouts can read."""
        assert metadata is not None, "given by checkpoint.py"
        tp_group, own = backend.tensor_parallel_group(), dict[str, Any]()
        self._save_to_state_dict(own, "", keep_vars=True)
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(DIVIDED, 0),
            sharded_offsets,
            tp_group=tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            found |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=tp_group
            )
        return found
