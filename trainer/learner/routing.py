"""Routing replay: each token goes to the experts that the engine sent it to, with the weights that the router gives them now.

Engine and learner round differently, and the router changes between versions; a token that is processed by other experts than at sampling
has another log-prob than the importance weight assumes. The chosen experts are data, like the tokens.

Reports are large, a byte for each token, layer and expert. So rank 0 holds them and sends each rank only those of its own positions and
layers. Shape suffixes: L positions of this rank, K experts per token.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, distributed

from trainer.batching.batch import Sample
from trainer.batching.packing import MicroBatch
from trainer.learner import backend
from trainer.learner.attention import Positions

Topk = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class _Share:
    """The part of each micro-batch and of the model that one rank computes."""

    data_rank: int
    part: int  # index of its part of the positions of each micro-batch
    layers: tuple[int, ...]  # numbers of the layers, from 0


class Routing:
    """Replays the engine's choice of experts in all mixture-of-experts layers of one model. Every rank builds one.

    It has no effect if the model has no experts, or if the engine reported no routing.
    """

    def __init__(self, model: GPTModel, positions: Positions) -> None:
        self._positions = positions
        self._layers: dict[int, LayerRouting] = {}  # keys are numbers of layers, from 0
        for layer in cast(Any, model.decoder.layers):
            if isinstance(layer.mlp, MoELayer):
                routing = LayerRouting(
                    place=len(self._layers), recomputed=model.config.recompute_granularity is not None
                )
                # Replaces Megatron's own object, which holds the experts of only one micro-batch for all layers of the process.
                cast(Any, layer.mlp.router).router_replay = routing
                self._layers[layer.layer_number - 1] = routing
        self._num_layers, self._per_token = model.config.num_layers, model.config.moe_router_topk
        self._shares = self._gather_shares() if self._layers else []

    def hand(self, samples: Sequence[Sample], hands: Sequence[Sequence[MicroBatch]]) -> list[MicroBatch]:
        """The micro-batches assigned to this data-parallel rank, with the reports that this rank replays. Collective."""
        mine = list(hands[parallel_state.get_data_parallel_rank()])
        if not self._layers or all(sample.routing is None for sample in samples):
            return mine
        reports = self._send(samples, hands) if distributed.get_rank() == 0 else self._receive(mine)
        return [replace(one, routing=report) for one, report in zip(mine, reports, strict=True)]

    def begin(self, microbatch: MicroBatch, *, train: bool) -> None:
        """Sets the micro-batch that the next forward pass computes."""
        mine_LK = None
        if self._layers and microbatch.routing is not None:
            num_mine = self._positions.smallest_part_size(microbatch.num_positions)
            shape = (num_mine, microbatch.routing.shape[1])
            # -1 marks padding positions, which have no reported experts.
            filled = np.full(shape, -1, np.int16)
            filled[: len(microbatch.routing)] = microbatch.routing
            mine_LK = torch.from_numpy(filled).to(backend.device()).long()
        for layer in self._layers.values():
            layer.begin(mine_LK, train=train)

    def _gather_shares(self) -> list[_Share]:
        """The shares of all ranks, in order."""
        data_rank = parallel_state.get_data_parallel_rank()
        shares: list[Any] = [None] * distributed.get_world_size()
        mine = _Share(data_rank, self._positions.smallest_part, tuple(self._layers))
        distributed.all_gather_object(shares, mine, group=backend.host_group())
        return shares

    def _send(
        self, samples: Sequence[Sample], hands: Sequence[Sequence[MicroBatch]]
    ) -> list[npt.NDArray[np.uint8]]:
        """Sends every other rank its routes, and returns those of rank 0. Only rank 0 calls it."""
        assert all(sample.routing is not None for sample in samples), (
            "a run asks for it in all requests or in none"
        )
        for rank, share in enumerate(self._shares[1:], 1):
            reports = [self._report(samples, one, share) for one in hands[share.data_rank]]
            body = np.concatenate([report.ravel() for report in reports])
            if len(body):
                distributed.send(torch.from_numpy(body), dst=rank, group=backend.host_group())
        first = self._shares[0]
        return [self._report(samples, one, first) for one in hands[first.data_rank]]

    def _receive(self, mine: Sequence[MicroBatch]) -> list[npt.NDArray[np.uint8]]:
        share = self._shares[distributed.get_rank()]
        width = len(share.layers) * self._per_token
        num_rows = [len(range(*self._rows(one, share).indices(_num_reported(one)))) for one in mine]
        body = torch.empty(sum(num_rows) * width, dtype=torch.uint8)
        if len(body):
            distributed.recv(body, src=0, group=backend.host_group())
        return np.split(body.numpy().reshape(-1, width), np.cumsum(num_rows)[:-1])

    def _report(
        self, samples: Sequence[Sample], microbatch: MicroBatch, share: _Share
    ) -> npt.NDArray[np.uint8]:
        """Returns the experts that the rank of `share` replays for a micro-batch: a row for each position, columns for its layers."""
        width = len(share.layers) * self._per_token
        chosen = [routing for index in microbatch.samples if (routing := samples[index].routing) is not None]
        if not chosen:  # padding
            return np.empty((0, width), np.uint8)
        every = np.concatenate(chosen).reshape(-1, self._num_layers, self._per_token)
        return every[self._rows(microbatch, share)][:, list(share.layers)].reshape(-1, width)

    def _rows(self, microbatch: MicroBatch, share: _Share) -> slice:
        size = self._positions.smallest_part_size(microbatch.num_positions)
        return slice(share.part * size, (share.part + 1) * size)


def _num_reported(microbatch: MicroBatch) -> int:
    """Returns the number of positions with reported routes: all of them, or 0 in a micro-batch of padding."""
    return microbatch.num_positions if microbatch.samples else 0


class LayerRouting:
    """Replaces the choice of experts in Megatron's router of one layer by the reported choice."""

    def __init__(self, *, place: int, recomputed: bool) -> None:
        """`place` is the index of the layer among the mixture-of-experts layers of this rank, from 0."""
        self._place = place
        self._recomputed = recomputed
        self._experts_LK: Tensor | None = None
        # Experts of the forward passes whose layers the backward pass will compute again, oldest first.
        self._again: deque[Tensor | None] = deque()

    def begin(self, experts_LK: Tensor | None, *, train: bool) -> None:
        self._experts_LK = experts_LK
        if not train:
            self._again.clear()
        elif self._recomputed:
            self._again.append(experts_LK)

    def get_replay_topk(
        self, scores_LN: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Topk
    ) -> tuple[Tensor, Tensor]:
        """Returns the scores and the numbers of the experts of each token. Megatron calls this method with these arguments."""
        own_LK, chosen_LK = choose(scores_LN, topk, num_groups=num_groups, group_topk=group_topk)
        is_backward = torch._C._current_graph_task_id() != -1
        all_layers_LK = self._again.popleft() if is_backward else self._experts_LK
        if all_layers_LK is None:
            return own_LK, chosen_LK
        reported_LK = all_layers_LK[:, self._place * topk : (self._place + 1) * topk]
        experts_LK = torch.where(reported_LK >= 0, reported_LK, chosen_LK)
        return scores_LN.gather(1, experts_LK), experts_LK
