"""Broadcasts the tensors of exported versions to one engine: a child process of the trainer, one for each engine.

A broadcast has no deadline and cannot be cancelled, so it must not run in the trainer's own process: the trainer ends this one if the
engine does not take part. Commands are JSON lines on standard input, each with one line as its answer:

    (at the start)                                    {"port": P}, at which the engine's ranks find this process
    {"join": WORLD_SIZE, "group": G, "backend": B}    {}, once all ranks have joined
    {"send": [[FILE, TENSOR], ...]}                   {}, once the tensors are broadcast in this order

The process ends when its standard input is closed.
"""

import sys
from datetime import timedelta
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    distributed_c10d,
)

JOIN_TIMEOUT = timedelta(minutes=10)


def main() -> None:
    # The store listens on all of the host's addresses. The world's size is not known yet, so it waits for no worker.
    store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=JOIN_TIMEOUT)
    _answer({"port": store.port})
    group: Any = None
    device = torch.device("cpu")
    for line in sys.stdin.buffer:
        command: dict[str, Any] = msgspec.json.decode(line)
        if "join" in command:
            device = torch.device("cuda" if command["backend"] == "nccl" else "cpu")
            group = _joined(store, command["group"], command["join"], command["backend"])
        else:
            _broadcast(group, command["send"], device)
        _answer({})


def _joined(store: Any, name: str, world_size: int, backend: str) -> Any:
    """The group in which this process is rank 0. It is made in the same way as by SGLang's ranks: PyTorch has no public function for
    a group of ranks that do not share a default group.
    """
    group, _ = distributed_c10d._new_process_group_helper(  # pyright: ignore[reportPrivateUsage]
        world_size,
        0,
        [],
        distributed_c10d.Backend(backend),
        PrefixStore(name, store),
        group_name=distributed_c10d.GroupName(name),
        timeout=JOIN_TIMEOUT,
    )
    return group


def _broadcast(group: Any, tensors: list[tuple[str, str]], device: torch.device) -> None:
    for path, name in tensors:
        with safe_open(path, framework="pt") as file:
            tensor = file.get_tensor(name).to(device)
        group.broadcast(tensor, 0).wait()
        del tensor  # before the next is read: the trainer's GPU, which is nearly full, holds one at a time
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
