"""The one place that knows whether this machine has CUDA.

With CUDA: nccl, the local GPU, and Megatron as it is. Without: gloo, the CPU, and stand-ins for the few
things Megatron asks of CUDA by name. The stand-ins are in force only inside `device_scope`, and each is a
true no-op on a CPU: placing a tensor on "cuda" places it where all tensors are, synchronising waits for work
that is already done, and the random state that Megatron forks per parallel rank is consumed by dropout only,
which these models do not have.
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
from torch.overrides import TorchFunctionMode

COLLECTIVE_TIMEOUT = timedelta(minutes=30)


class CudaAsCpu(TorchFunctionMode):
    """While active, a tensor asked for on "cuda" is made on the CPU, and CPU tensors say they are CUDA's."""

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
        stack.enter_context(_between_themselves())
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
def _between_themselves() -> Iterator[None]:
    """Warnings from Megatron to torch or to itself are nothing that a user of ours could act on."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
        # Seen from torch, these calls of Megatron's come from whoever stands between: CudaAsCpu.
        warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        yield


def join(*, rank: int = 0, world_size: int = 1, local_rank: int = 0) -> None:
    """Enter the process group of the run; a second call is ignored.

    More than one process: the meeting point is what torchrun put in MASTER_ADDR and MASTER_PORT. One: no port
    is opened.
    """
    if distributed.is_initialized():
        return
    if has_cuda():
        torch.cuda.set_device(local_rank)
    distributed.init_process_group(
        "nccl" if has_cuda() else "gloo",
        rank=rank,
        world_size=world_size,
        store=distributed.HashStore() if world_size == 1 else None,
        timeout=COLLECTIVE_TIMEOUT,
    )


def lay_out(*, tensor_parallel: int, pipeline_parallel: int) -> None:
    """Divide the ranks into tensor, pipeline and data-parallel groups. ValueError where they do not."""
    world_size, needed = distributed.get_world_size(), tensor_parallel * pipeline_parallel
    if world_size % needed:
        raise ValueError(
            f"learner.tensor_parallel = {tensor_parallel}, learner.pipeline_parallel = {pipeline_parallel}: "
            f"they need processes in multiples of {needed}, not {world_size}; start so many or lower one"
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
    # Without dropout nothing random happens once the weights are read: a tracker that forks no state will do.
    initialize_rng_tracker(inference_rng_tracker=True)


def leave() -> None:
    """Leave the process group; a process that never joined may call it too."""
    if distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        distributed.destroy_process_group()
