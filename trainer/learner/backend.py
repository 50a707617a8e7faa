"""The one place that knows whether this machine has CUDA.

With CUDA: nccl, the local GPU, and Megatron unchanged. Without: gloo, the CPU, and stand-ins for the few CUDA functions that
Megatron calls by name. The stand-ins apply only inside `device_scope`, and each is a true no-op on a CPU: a tensor placed on
"cuda" goes where all tensors are, synchronising waits for work that is already done, and the random state that Megatron forks
per parallel rank serves dropout alone, which these models do not have.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor, distributed
from torch._C._distributed_c10d import HashStore  # torch.distributed does not export it to type checkers
from torch.overrides import TorchFunctionMode

COLLECTIVE_TIMEOUT = timedelta(minutes=30)


class CudaAsCpu(TorchFunctionMode):
    """While active, tensors requested on "cuda" are made on the CPU, and CPU tensors report CUDA types."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if str(kwargs.get("device") or "").startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


def has_cuda() -> bool:
    return torch.cuda.is_available()


def device() -> torch.device:
    """Where parameters and activations live."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def host_copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies on the host, complete on return; with CUDA in page-locked memory, to which the GPU copies at full speed."""
    copies = [
        torch.empty_like(tensor, device="cpu", pin_memory=has_cuda()).copy_(
            tensor.detach(), non_blocking=True
        )
        for tensor in tensors
    ]
    if has_cuda():
        torch.cuda.current_stream().synchronize()
    return copies


@contextlib.contextmanager
def device_scope() -> Iterator[None]:
    """Everything that calls into Megatron runs in here."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_library_warnings_ignored())
        if not has_cuda():
            stack.enter_context(_stand_ins())
            stack.enter_context(CudaAsCpu())
        yield


class _FinishedStream:
    """A CUDA stream whose work is always done, and its own event."""

    def wait_stream(self, _other: object) -> None: ...

    def record_event(self) -> "_FinishedStream":
        return self

    def synchronize(self) -> None: ...


def _counts_on_host(counts: Any, as_numpy: bool = False, **_: Any) -> Any:
    return counts.numpy() if as_numpy and isinstance(counts, torch.Tensor) else counts


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    here, stream = torch.device("cpu"), _FinishedStream()
    replacements: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.cuda, "current_device", lambda: here),
        (torch.cuda, "synchronize", lambda *_: None),
        # The dispatcher of tokens to experts copies counts to the host on a stream of its own, some of them as arrays.
        (torch.cuda, "Stream", _FinishedStream),
        (torch.cuda, "current_stream", lambda: stream),
        (torch.cuda, "stream", lambda _stream: contextlib.nullcontext()),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _counts_on_host),
        # Recomputation puts back the random state that the first pass began with.
        (megatron_random, "_get_cuda_rng_state", lambda **_: None),
        (megatron_random, "_set_cuda_rng_state", lambda *_, **__: None),
    ]
    real = [getattr(module, name) for module, name, _ in replacements]
    for module, name, stand_in in replacements:
        setattr(module, name, stand_in)
    try:
        yield
    finally:
        for (module, name, _), function in zip(replacements, real, strict=True):
            setattr(module, name, function)


@contextlib.contextmanager
def _library_warnings_ignored() -> Iterator[None]:
    """Warnings about how Megatron and torch call each other; our users cannot act on them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
        # Megatron's calls, which torch attributes to CudaAsCpu because they pass through it.
        warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        yield


def join(*, rank: int = 0, world_size: int = 1, local_rank: int = 0) -> None:
    """Enter the process group of the run; a second call is ignored.

    Several processes meet at the MASTER_ADDR and MASTER_PORT that torchrun set; a single one opens no port.
    """
    if distributed.is_initialized():
        return
    if has_cuda():
        torch.cuda.set_device(local_rank)
    distributed.init_process_group(
        "nccl" if has_cuda() else "gloo",
        rank=rank,
        world_size=world_size,
        store=HashStore() if world_size == 1 else None,
        timeout=COLLECTIVE_TIMEOUT,
    )


def lay_out(
    *, tensor_parallel: int, pipeline_parallel: int, context_parallel: int = 1, expert_parallel: int = 1
) -> None:
    """Divide the ranks into tensor-, context-, pipeline- and data-parallel groups. Raises ValueError if they cannot be.

    Experts have a division of their own: each is whole on its rank, and the ranks of a pipeline stage, over tensor, context and
    data parallelism, form groups of `expert_parallel` that share the experts.
    """
    world_size, needed = distributed.get_world_size(), tensor_parallel * pipeline_parallel * context_parallel
    if world_size % needed:
        raise ValueError(
            f"learner.tensor_parallel = {tensor_parallel}, learner.pipeline_parallel = {pipeline_parallel}, "
            f"learner.context_parallel = {context_parallel}: they need a multiple of {needed} processes, not "
            f"{world_size}; start that many or lower one of them"
        )
    if world_size % (pipeline_parallel * expert_parallel):
        raise ValueError(
            f"learner.expert_parallel = {expert_parallel}: the {world_size // pipeline_parallel} processes of a "
            "pipeline stage cannot share the experts equally; set it to a divisor of that number"
        )
    if parallel_state.model_parallel_is_initialized():
        if (tensor_parallel, pipeline_parallel, context_parallel, expert_parallel) == (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
        ):
            return
        _close_layout()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=pipeline_parallel,
        context_parallel_size=context_parallel,
        expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=1,
    )
    # Without dropout nothing random happens once the weights are read, so a tracker that forks no state is enough.
    initialize_rng_tracker(inference_rng_tracker=True)


def _close_layout() -> None:
    """Close the groups of the present layout. Megatron forgets them but leaves them open, each with a thread that polls."""
    distributed.barrier()  # no rank may still be using them
    groups = cast(list[Any], parallel_state._global_process_group_list)[1:]  # the first stands for all ranks
    for group in groups:
        distributed.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def tensor_parallel_group() -> distributed.ProcessGroup:
    group = parallel_state.get_tensor_model_parallel_group()
    assert isinstance(group, distributed.ProcessGroup)
    return group


def pipeline_parallel_group() -> distributed.ProcessGroup:
    group = parallel_state.get_pipeline_model_parallel_group()
    assert isinstance(group, distributed.ProcessGroup)
    return group


def context_parallel_group() -> distributed.ProcessGroup:
    group = parallel_state.get_context_parallel_group()
    assert isinstance(group, distributed.ProcessGroup)
    return group


def replica_group(parameter: Tensor) -> distributed.ProcessGroup:
    """The ranks that hold the same part of a parameter: the data-parallel ones, of an expert those that have this expert."""
    if getattr(parameter, "allreduce", True):  # Megatron's mark: False for experts
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    else:
        group = parallel_state.get_expert_data_parallel_group()
    assert isinstance(group, distributed.ProcessGroup)
    return group


def leave() -> None:
    """Leave the process group; a process that never joined may call it too."""
    if distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        distributed.destroy_process_group()
