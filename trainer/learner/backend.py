"""The only module that knows whether this machine has CUDA.
With CUDA: nccl, the local GPU, and Megatron unchanged. Without: gloo, the CPU, and stand-ins for the few CUDA functions that Megatron calls
by name. The stand-ins apply only inside `device_scope`, and each is a true no-op on a CPU: a tensor placed on "cuda" goes where all tensors
are, synchronising waits for work that is already done, and the random state that Megatron forks per parallel rank is used for dropout only,
which these models do not have.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from torch import Tensor, distributed

# torch.distributed does not export these to type checkers.
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.rendezvous import rendezvous
from torch.overrides import TorchFunctionMode

from trainer.learner.directories import DiskFull

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(minutes=5)
"""The longest wait of the ranks in a collective for a rank that does not join it, because it alone has failed; then they fail, too."""

DISK_TIMEOUT = timedelta(minutes=30)
"""The longest wait of ranks for each other to start, and to read and write files. A rank that has ended is noticed at once."""


class CudaAsCpu(TorchFunctionMode):
    """Makes tensors that are requested on "cuda" on the CPU while it is active, and lets CPU tensors report CUDA types."""

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
    """The device of parameters and activations."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def num_threads() -> int:
    """The number of threads of one operation on the CPU. With another number, sums are added in another order."""
    return torch.get_num_threads()


def use_threads(number: int) -> None:
    """Uses this number of threads from now on."""
    torch.set_num_threads(number)


def page_lock(block: Tensor) -> None:
    """Let a GPU copy to and from a block of host memory at full speed. Nothing happens without CUDA.

    Raises RuntimeError where the machine does not allow it.
    """
    if has_cuda() and block.nbytes:
        torch.cuda.check_error(
            int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.nbytes, 0))  # type: ignore[attr-defined]
        )


def wait_for_copies() -> None:
    """Waits until all copies between GPU and host are complete."""
    if has_cuda():
        torch.cuda.current_stream().synchronize()


@contextlib.contextmanager
def device_scope() -> Iterator[None]:
    """The scope of all calls into Megatron."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_library_warnings_ignored())
        if not has_cuda():
            stack.enter_context(_stand_ins())
            stack.enter_context(CudaAsCpu())
        yield


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    here = torch.device("cpu")
    replacements: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.cuda, "current_device", lambda: here),
        (torch.cuda, "synchronize", lambda *_: None),
        # Megatron's dispatcher of tokens to experts, in the place of which is ours, makes one.
        (torch.cuda, "Stream", object),
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
        store=HashStore() if world_size == 1 else _store_with_all(rank, world_size),
        timeout=COLLECTIVE_TIMEOUT,
    )


def _store_with_all(rank: int, world_size: int) -> Store:
    """The store through which the processes meet, once all of them have joined."""
    store, _, _ = next(iter(rendezvous("env://", rank, world_size, timeout=DISK_TIMEOUT)))
    store = PrefixStore("learner", store)
    store.set(f"rank {rank} is here", "")
    store.wait([f"rank {other} is here" for other in range(world_size)], DISK_TIMEOUT)
    return store


@contextlib.contextmanager
def patient() -> Iterator[None]:
    """Collectives wait for DISK_TIMEOUT inside the block, because libraries read files between them."""
    _set_pg_timeout(DISK_TIMEOUT, distributed.group.WORLD)
    try:
        yield
    finally:
        _set_pg_timeout(COLLECTIVE_TIMEOUT, distributed.group.WORLD)


def all_gathered(own: T) -> list[T]:
    """The values of all ranks, by rank, on every rank. Collective."""
    everywhere: list[Any] = [own] * distributed.get_world_size()
    if len(everywhere) > 1:
        distributed.all_gather_object(everywhere, own, group=disk_group())
    return everywhere


@contextlib.contextmanager
def together() -> Iterator[None]:
    """An error that one rank raises in the block, because of its files or its memory, is raised on all ranks, as by `agree`. Collective.

    No rank waits for another one inside the block.
    """
    failure = None
    try:
        yield
    except (OSError, ValueError, MemoryError, RuntimeError) as error:  # torch's errors are RuntimeErrors
        failure = error
    agree(failure)


def agree(failure: Exception | None) -> None:
    """Raise one rank's error on every rank: DiskFull and ValueError unchanged, any other error as OSError with the rank.

    Collective, with the long timeout of `patient`: some ranks may still be reading or writing files.
    """
    # Errors of other types may not be picklable, so they travel as OSError.
    own = failure if failure is None or type(failure) in (DiskFull, ValueError) else OSError(str(failure))
    for rank, one in enumerate(all_gathered(own)):
        if isinstance(one, DiskFull | ValueError):
            raise one from failure if one is not failure else None
        if one is not None:
            raise OSError(f"rank {rank}: {one}") from failure


def lay_out(
    *, tensor_parallel: int, pipeline_parallel: int, context_parallel: int = 1, expert_parallel: int = 1
) -> None:
    """Divide the ranks into tensor-, context-, pipeline- and data-parallel groups. Raises ValueError if they cannot be.

    Experts are divided separately: each is whole on its rank, and the ranks of a pipeline stage, over tensor, context and
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
        distributed_timeout_minutes=COLLECTIVE_TIMEOUT / timedelta(minutes=1),  # type: ignore[arg-type]
    )
    # Without dropout nothing random happens once the weights are read, so a tracker that forks no state is enough.
    initialize_rng_tracker(inference_rng_tracker=True)


def _close_layout() -> None:
    """Closes the groups of the present layout. Megatron drops them but leaves them open, each with a thread that polls."""
    distributed.barrier()  # no rank may still be using them
    # The first is the group of all ranks.
    groups = cast(list[Any], parallel_state._global_process_group_list)[1:]
    for group in groups:
        distributed.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def expert_parallel_group() -> distributed.ProcessGroup:
    group = parallel_state.get_expert_model_parallel_group()
    assert isinstance(group, distributed.ProcessGroup)
    return group


def expert_tensor_parallel_group() -> distributed.ProcessGroup:
    """The ranks that have parts of the same expert: one, for each expert is whole."""
    group = parallel_state.get_expert_tensor_parallel_group()
    assert isinstance(group, distributed.ProcessGroup)
    return group


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


@functools.cache
def disk_group() -> distributed.ProcessGroup:
    """The group of all ranks, with which they wait for each other's files. The first call is collective."""
    group = distributed.new_group(backend="gloo", timeout=DISK_TIMEOUT)
    assert isinstance(group, distributed.ProcessGroup)
    return group


@functools.cache
def host_group() -> distributed.ProcessGroup:
    """The group of all ranks, for tensors in host memory: nccl would need them on a GPU. The first call is collective."""
    group = distributed.group.WORLD
    if has_cuda() and distributed.get_world_size() > 1:
        group = distributed.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    assert isinstance(group, distributed.ProcessGroup)
    return group


def begin_copy_to_host(numbers: Tensor) -> Callable[[], list[Any]]:
    """Begins to copy numbers to the host. What it returns waits for them, and for nothing that the device was given later."""
    copied = numbers.to("cpu", non_blocking=True)
    if not numbers.is_cuda:
        return copied.tolist
    done = torch.cuda.Event()
    done.record()

    def wait() -> list[Any]:
        done.synchronize()
        return copied.tolist()

    return wait


def replica_group(parameter: Tensor) -> distributed.ProcessGroup:
    """The ranks that hold the same part of a parameter: the data-parallel ranks, or for an expert the ranks that have this expert."""
    if getattr(parameter, "allreduce", True):  # Megatron's flag: False for experts
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    else:
        group = parallel_state.get_expert_data_parallel_group()
    assert isinstance(group, distributed.ProcessGroup)
    return group


def leave() -> None:
    """Leave the process group; a process that never joined may call it too."""
    host_group.cache_clear()
    disk_group.cache_clear()
    if distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        distributed.destroy_process_group()
