"""The one place that knows whether this machine has CUDA.

With CUDA: nccl, the local GPU, and Megatron unchanged. Without: gloo, the CPU, and stand-ins for the few CUDA functions that
Megatron calls by name. The stand-ins apply only inside `device_scope`, and each is a true no-op on a CPU: a tensor placed on
"cuda" goes where all tensors are, synchronising waits for work that is already done, and the random state that Megatron forks
per parallel rank serves dropout alone, which these models do not have.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from torch import distributed
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


@contextlib.contextmanager
def device_scope() -> Iterator[None]:
    """Everything that calls into Megatron runs in here."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_library_warnings_ignored())
        if not has_cuda():
            stack.enter_context(_stand_ins())
            stack.enter_context(CudaAsCpu())
        yield


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    real = torch.cuda.current_device, torch.cuda.synchronize
    here = torch.device("cpu")
    torch.cuda.current_device, torch.cuda.synchronize = lambda: here, lambda *_: None
    try:
        yield
    finally:
        torch.cuda.current_device, torch.cuda.synchronize = real


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


def lay_out(*, tensor_parallel: int, pipeline_parallel: int) -> None:
    """Divide the ranks into tensor-, pipeline- and data-parallel groups. Raises ValueError if they cannot be."""
    world_size, needed = distributed.get_world_size(), tensor_parallel * pipeline_parallel
    if world_size % needed:
        raise ValueError(
            f"learner.tensor_parallel = {tensor_parallel}, learner.pipeline_parallel = {pipeline_parallel}: "
            f"they need a multiple of {needed} processes, not {world_size}; start that many or lower one of the two"
        )
    if parallel_state.model_parallel_is_initialized():
        if (tensor_parallel, pipeline_parallel) == (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        ):
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel, pipeline_model_parallel_size=pipeline_parallel
    )
    # Without dropout nothing random happens once the weights are read, so a tracker that forks no state is enough.
    initialize_rng_tracker(inference_rng_tracker=True)


def tensor_parallel_group() -> distributed.ProcessGroup:
    group = parallel_state.get_tensor_model_parallel_group()
    assert isinstance(group, distributed.ProcessGroup)
    return group


def pipeline_parallel_group() -> distributed.ProcessGroup:
    group = parallel_state.get_pipeline_model_parallel_group()
    assert isinstance(group, distributed.ProcessGroup)
    return group


def leave() -> None:
    """Leave the process group; a process that never joined may call it too."""
    if distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        distributed.destroy_process_group()
