"""The way of tokens to their experts and back.

Shape suffixes: R rows, one for each choice of an expert by a position of this process, or on their way those that arrive for its experts;
G experts of this process, S processes that share the experts of a layer.
"""

from typing import Any, cast

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, distributed

from trainer.learner import backend


class TokenDispatcher:
    """Sends each position to the experts that it chose, and adds up what they return.

    The host waits for the device once in a forward pass, and only if processes share the experts: it has to know how many rows it sends to
    each of them and receives. Megatron's own dispatchers wait for the number of rows and for those of each expert, too.

    Megatron's layer calls the methods in the order in which they are here, with these names of arguments.
    """

    def __init__(self, *, per_token: int, group: distributed.ProcessGroup) -> None:
        """`per_token` is the number of experts that a position chooses, and the processes of `group` share the experts."""
        self._per_token = per_token
        self._group = group
        self._num_processes = group.size()

    def dispatch_preprocess(
        self, tokens: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """This process's rows, sorted by expert, and the share of each. `routing_map` and `probs` are of P x all experts."""
        self._shape, num_positions = tokens.shape, len(routing_map)
        num_rows = num_positions * self._per_token
        choices = torch.nonzero_static(routing_map.T.flatten(), size=num_rows)[:, 0]
        counts = routing_map.sum(0)
        # A report that names an expert twice for a position leaves rows over. They go to the last expert and have no share.
        counts[-1] += num_rows - counts.sum()
        shares_R = probs.T.flatten().gather(0, choices.clamp(min=0)).where(choices >= 0, 0)
        self._sources_R = choices.clamp(min=0) % num_positions
        self._counts_SG = counts.view(self._num_processes, -1)
        if self._num_processes > 1:
            theirs_SG = torch.empty_like(self._counts_SG)
            distributed.all_to_all_single(theirs_SG, self._counts_SG, group=self._group)
            splits = torch.stack([self._counts_SG.sum(1), theirs_SG.sum(1)])
            self._counts_SG, self._splits = theirs_SG, backend.begin_copy_to_host(splits)
        return tokens.view(-1, tokens.shape[-1]).index_select(0, self._sources_R), shares_R

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of this process's experts, from each process in order, and their shares."""
        if self._num_processes == 1:
            return hidden_states, probs
        self._sent, self._received = self._splits()
        return (
            all_to_all(self._group, hidden_states, self._received, self._sent),
            all_to_all(self._group, probs, self._received, self._sent),
        )

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """These rows sorted by expert, the number of rows of each expert, and the shares."""
        counts_SG = self._counts_SG
        if self._num_processes > 1:
            experts = torch.arange(counts_SG.shape[1], device=counts_SG.device).repeat(self._num_processes)
            of_row = experts.repeat_interleave(counts_SG.flatten(), output_size=len(hidden_states))
            self._order = of_row.argsort(stable=True)
            hidden_states, probs = (part.index_select(0, self._order) for part in (hidden_states, probs))
        return hidden_states, counts_SG.sum(0), probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """The results in the order in which the rows arrived."""
        if self._num_processes == 1:
            return hidden_states
        return torch.empty_like(hidden_states).scatter(0, _of_rows(self._order, hidden_states), hidden_states)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """The results of this process's rows."""
        if self._num_processes == 1:
            return hidden_states
        return all_to_all(self._group, hidden_states, self._sent, self._received)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """The sum of its rows for each position, in the shape of the tokens."""
        sums = hidden_states.new_zeros(self._shape).view(-1, self._shape[-1])
        return sums.scatter_add(0, _of_rows(self._sources_R, hidden_states), hidden_states).view(self._shape)


def _of_rows(places_R: Tensor, rows: Tensor) -> Tensor:
    """The index with which whole rows are scattered. torch's functions for that keep the rows for the backward pass."""
    return places_R[:, None].expand_as(rows)


def replace_dispatchers(model: GPTModel) -> None:
    """Give the layers of `model` that have experts our dispatcher in the place of Megatron's."""
    for layer in cast(Any, model.decoder.layers):
        if isinstance(layer.mlp, MoELayer):
            cast(Any, layer.mlp).token_dispatcher = TokenDispatcher(
                per_token=model.config.moe_router_topk, group=backend.expert_parallel_group()
            )
