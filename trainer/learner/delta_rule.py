"""The gated delta rule over packed samples, and the convolution before it. Plain torch, exact in fp32, and the same on every device: there
is no kernel of its own for a GPU.

Each value head has a state, a matrix S that is zero before a sample's first position. For a position with query q, key k, value v, decay
a in 0..1 and strength b in 0..1 (arXiv 2412.06464):

    S <- a S                        what is remembered fades
    S <- S + k b (v - S^T k)^T      what the key stands for moves towards the value
    o  = S^T q

Queries and keys are scaled to a length of 1, queries then by 1/sqrt(width). Positions are taken in chunks. Within a chunk the corrections
of all positions solve one triangular system, since each depends on those before it; the states pass from chunk to chunk. Each sample begins
a chunk, and positions that fill up its last one have a strength of 0, which changes nothing.

Shape suffixes: P positions, G key heads, R value heads of a key head, K width of a key, V width of a value, N chunks, C positions of a
chunk, E channels, W positions that the convolution covers.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
LENGTH_EPS = 1e-6


def gated_delta_rule(
    query_PGK: Tensor,
    key_PGK: Tensor,
    value_PGRV: Tensor,
    log_decay_PGR: Tensor,
    strength_PGR: Tensor,
    boundaries: Sequence[int],
) -> Tensor:
    """The outputs of all positions, fp32 of P x G x R x V. `boundaries` has the first position of each sample, and P."""
    rows_P, firsts, num_chunks = _places(boundaries, query_PGK.device)

    def chunked(values: Tensor) -> Tensor:
        """fp32 of N x C and the other dimensions; 0 at positions that fill up a chunk."""
        grid = values.new_zeros(num_chunks * CHUNK, *values.shape[1:], dtype=torch.float32)
        return grid.index_copy(0, rows_P, values.float()).unflatten(0, (num_chunks, CHUNK))

    query_NG1CK = chunked(_unit(query_PGK) * query_PGK.shape[-1] ** -0.5).transpose(1, 2)[:, :, None]
    key_NG1CK = chunked(_unit(key_PGK)).transpose(1, 2)[:, :, None]
    value_NGRCV = chunked(value_PGRV).permute(0, 2, 3, 1, 4)
    # From before the chunk to each position. Differences of sums in fp32 would be off by the rounding of the larger one.
    decays_NGRC = chunked(log_decay_PGR).permute(0, 2, 3, 1).double().cumsum(-1)
    strength_NGRC1 = chunked(strength_PGR).permute(0, 2, 3, 1)[..., None]

    later_CC = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query_PGK.device).triu(1)
    between = decays_NGRC[..., :, None] - decays_NGRC[..., None, :]
    kept_NGRCC = between.masked_fill(later_CC, -torch.inf).float().exp()
    since_NGRC1 = decays_NGRC.float().exp()[..., None]
    keys_across_NG1KC = key_NG1CK.transpose(-1, -2)

    overlap_NGRCC = (strength_NGRC1 * (key_NG1CK @ keys_across_NG1KC) * kept_NGRCC).tril(-1)
    targets = torch.cat([value_NGRCV, key_NG1CK * since_NGRC1], dim=-1) * strength_NGRC1
    solved = torch.linalg.solve_triangular(overlap_NGRCC, targets, upper=False, unitriangular=True)
    widths = [value_NGRCV.shape[-1], key_NG1CK.shape[-1]]
    corrections_NGRCV, reads_NGRCK = solved.split(widths, dim=-1)
    to_end_NGRC1 = (decays_NGRC[..., -1:] - decays_NGRC).float().exp()[..., None]
    found_NGRCV = _from_chunk_to_chunk(
        corrections_NGRCV,
        reads_NGRCK,
        (query_NG1CK @ keys_across_NG1KC) * kept_NGRCC,
        query_NG1CK * since_NGRC1,
        (key_NG1CK * to_end_NGRC1).transpose(-1, -2),
        since_NGRC1[..., -1:, :],
        firsts,
    )
    return found_NGRCV.permute(0, 3, 1, 2, 4).flatten(0, 1)[rows_P]


def _from_chunk_to_chunk(
    corrections_NGRCV: Tensor,
    reads_NGRCK: Tensor,
    scores_NGRCC: Tensor,
    queries_NGRCK: Tensor,
    writes_NGRKC: Tensor,
    fading_NGR11: Tensor,
    firsts: frozenset[int],
) -> Tensor:
    """The outputs, N x G x R x C x V. `firsts` are the chunks that begin a sample, which find no state."""
    found, state_GRKV = list[Tensor](), None
    of_chunks = (corrections_NGRCV, reads_NGRCK, scores_NGRCC, queries_NGRCK, writes_NGRKC, fading_NGR11)
    for index, (correction, read, score, query, write, fading) in enumerate(
        zip(*(values.unbind(0) for values in of_chunks), strict=True)
    ):
        if index in firsts or state_GRKV is None:
            found.append(score @ correction)
            state_GRKV = write @ correction
            continue
        change = correction - read @ state_GRKV
        found.append(query @ state_GRKV + score @ change)
        state_GRKV = fading * state_GRKV + write @ change
    return torch.stack(found)


def _places(boundaries: Sequence[int], device: torch.device) -> tuple[Tensor, frozenset[int], int]:
    """The row of each position among those of all chunks, the chunks that begin a sample, and the number of chunks."""
    rows, firsts, num_chunks = list[Tensor](), set[int](), 0
    for start, stop in pairwise(boundaries):
        firsts.add(num_chunks)
        rows.append(torch.arange(stop - start) + num_chunks * CHUNK)
        num_chunks += -(-(stop - start) // CHUNK)
    return torch.cat(rows).to(device), frozenset(firsts), num_chunks


def _unit(vectors: Tensor) -> Tensor:
    """Scaled to a length of 1, fp32."""
    wide = vectors.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + LENGTH_EPS)


def causal_convolution(inputs_PE: Tensor, weight_E1W: Tensor, boundaries: Sequence[int]) -> Tensor:
    """Each channel's weighted sum over a position and those before it in its sample, P x E."""
    num_before = weight_E1W.shape[2] - 1
    # Zeros before each sample stand for the positions that it does not have.
    gaps_P = torch.repeat_interleave(
        torch.arange(len(boundaries) - 1) * num_before, torch.tensor(boundaries).diff()
    )
    rows_P = (torch.arange(boundaries[-1]) + gaps_P).to(inputs_PE.device)
    num_rows = boundaries[-1] + (len(boundaries) - 1) * num_before
    spaced = inputs_PE.new_zeros(num_rows, inputs_PE.shape[1]).index_copy(0, rows_P + num_before, inputs_PE)
    convolved = F.conv1d(spaced.T[None], weight_E1W, groups=weight_E1W.shape[0])[0]
    return convolved.T[rows_P]
