"""An engine's end of a broadcast, without an engine: joins the sender's group as SGLang's `init_custom_process_group` does, and compares
what arrives with the file. Commands are JSON lines on standard input, each with one line as its answer:

    {"join": PORT, "group": G, "backend": B}             {}, once the sender has joined too
    {"receive": [SentTensor, ...]}                       {"different": N}, the number of tensors that are not those of the file
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

from trainer.weights.distributed import SentTensor

TIMEOUT = timedelta(seconds=40)
GPU = 1  # the sender has GPU 0


def main() -> None:
    group: Any = None
    device = torch.device("cpu")
    for line in sys.stdin.buffer:
        command: dict[str, Any] = msgspec.json.decode(line)
        answer: dict[str, int] = {}
        if "join" in command:
            if command["backend"] == "nccl":
                device = torch.device("cuda", GPU)
                torch.cuda.set_device(device)
            group = _joined(command["join"], command["group"], command["backend"])
        else:
            tensors = msgspec.convert(command["receive"], list[SentTensor])
            answer = {"different": sum(not _receive(group, tensor, device) for tensor in tensors)}
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


def _joined(port: int, name: str, backend: str) -> Any:
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    group, _ = distributed_c10d._new_process_group_helper(  # pyright: ignore[reportPrivateUsage]
        2,
        1,
        [],
        distributed_c10d.Backend(backend),
        PrefixStore(name, store),
        group_name=distributed_c10d.GroupName(name),
        timeout=TIMEOUT,
    )
    return group


def _receive(group: Any, tensor: SentTensor, device: torch.device) -> bool:
    """Whether what arrives is what the file has."""
    received = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device=device)
    group.broadcast(received, 0).wait()
    with safe_open(tensor.path, framework="pt") as file:
        return torch.equal(received.cpu(), file.get_tensor(tensor.name))


if __name__ == "__main__":
    main()
