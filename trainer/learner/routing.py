"""Routing replay: each token goes to the experts that the engine sent it to, with the weights that the router gives them now.

Engine and learner round differently, and between versions the router moves; a token that goes to another expert than it was
sampled with has another log-prob than the importance weight supposes. Which experts were chosen is data, as the tokens are.
Shape suffixes: L positions of this rank, K experts per token.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from trainer.batching.packing import MicroBatch
from trainer.learner.positions import Positions

Topk = Callable[..., tuple[Tensor, Tensor]]


class Routing:
    """Of all layers of one model. Without experts, or without a report of the engine, it changes nothing."""

    def __init__(self, model: GPTModel, positions: Positions) -> None:
        self._positions = positions
        self._in_parts = model.config.sequence_parallel
        self._layers: list[tuple[int, LayerRouting]] = []
        for layer in cast(Any, model.decoder.layers):
            if isinstance(layer.mlp, MoELayer):
                routing = LayerRouting(recomputed=model.config.recompute_granularity is not None)
                # The place of Megatron's own, which holds the experts of one micro-batch for all layers of the process.
                cast(Any, layer.mlp.router).router_replay = routing
                self._layers.append((layer.layer_number - 1, routing))

    def begin(self, microbatch: MicroBatch, *, train: bool) -> None:
        """The micro-batch that the next forward pass is about."""
        mine_LK = None
        if self._layers and microbatch.routing_P is not None:
            mine_LK = self._positions.mine(microbatch.routing_P, fill=-1).long()
            if self._in_parts:
                mine_LK = mine_LK.chunk(parallel_state.get_tensor_model_parallel_world_size())[
                    parallel_state.get_tensor_model_parallel_rank()
                ]
        for number, layer in self._layers:
            layer.begin(mine_LK, number, train=train)


class LayerRouting:
    """Of one layer: takes the place of the choice of experts in Megatron's router."""

    def __init__(self, *, recomputed: bool) -> None:
        self._recomputed = recomputed
        self._experts_LK: Tensor | None = None
        # Of forward passes whose layers the backward pass will compute again, oldest first.
        self._again: deque[Tensor | None] = deque()

    def begin(self, experts_LK: Tensor | None, layer: int, *, train: bool) -> None:
        self._layer = layer
        self._experts_LK = experts_LK
        if not train:
            self._again.clear()
        elif self._recomputed:
            self._again.append(experts_LK)

    def get_replay_topk(
        self, scores_LN: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Topk
    ) -> tuple[Tensor, Tensor]:
        """Scores and numbers of the experts of each token, by Megatron's name and arguments."""
        own_LK, chosen_LK = choose(scores_LN, topk, num_groups=num_groups, group_topk=group_topk)
        is_backward = torch._C._current_graph_task_id() != -1
        all_layers_LK = self._again.popleft() if is_backward else self._experts_LK
        if all_layers_LK is None:
            return own_LK, chosen_LK
        reported_LK = all_layers_LK[:, self._layer * topk : (self._layer + 1) * topk]
        experts_LK = torch.where(reported_LK >= 0, reported_LK, chosen_LK)
        return scores_LN.gather(1, experts_LK), experts_LK
