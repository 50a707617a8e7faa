"""The machine as torch, NCCL and SGLang find it."""

import os
import resource
import shutil
import sys
from itertools import permutations
from pathlib import Path

import torch
from torch.cuda import nccl
from torch.distributed import is_nccl_available

from benchmarks.gpu_check import inventory
from benchmarks.gpu_check.steps import DeviceKind, Findings
from trainer.learner.devices import recognise
from trainer.learner.optimizer import check_adam

GIB = 2**30
SHARED_GIB = 1.0  # NCCL's buffers between the GPUs of a node; Docker gives 64 MiB unless it is told otherwise
FREE_GIB = 20.0  # SmolLM2, base images and the versions of a short run
OPEN_FILES = 4096  # connections of a router, workers and sandboxes
BF16_CAPABILITY = (8, 0)


def check(device: DeviceKind) -> Findings:
    found = Findings.none()
    _host(found)
    _packages(found)
    if device == "cuda":
        _gpus(found)
    return found


def _host(found: Findings) -> None:
    shared = shutil.disk_usage("/dev/shm").total / GIB
    found.at_least(
        "/dev/shm, GiB", shared, SHARED_GIB, "start the container with --shm-size=16g or --ipc=host"
    )
    free = shutil.disk_usage(Path.cwd()).free / GIB
    found.at_least("free disk here, GiB", free, FREE_GIB, "free some, or work on another disk")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = float(sys.maxsize if soft == resource.RLIM_INFINITY else soft)
    found.at_least("open files", files, OPEN_FILES, "`ulimit -n 65536` in this shell")
    found.numbers["cores"] = os.cpu_count()
    found.numbers["host memory, GiB"] = inventory.machine().memory_gib


def _packages(found: Findings) -> None:
    """torch and megatron-core are those that the tests run with, and Adam is torch's."""
    for name in ("torch", "megatron-core"):
        wanted, present = inventory.pinned(name), inventory.version_of(name).partition("+")[0]
        found.require(
            name,
            present,
            holds=present == wanted,
            otherwise=f"{name} is {present}, and everything was written for {wanted}: pip install {name}=={wanted}",
        )
    try:
        check_adam()
    except ValueError as error:
        found.faults.append(str(error))


def _gpus(found: Findings) -> None:
    """What torch sees. Missing peer access is noted and is no fault: NCCL goes through host memory then."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found.require(
        "GPUs that torch sees",
        num_gpus,
        holds=num_gpus > 0,
        otherwise=f"torch {torch.__version__} sees no CUDA device: compare its CUDA with nvidia-smi's; look at CUDA_VISIBLE_DEVICES",
    )
    if not num_gpus:
        return
    for index in range(num_gpus):
        about = torch.cuda.get_device_properties(index)
        known = recognise(about.name, about.total_memory)
        free, total = torch.cuda.mem_get_info(index)
        found.numbers[f"GPU {index}"] = f"{about.name}, {total / GIB:.1f} GiB"
        found.numbers[f"GPU {index} in a plan"] = known.name if known else "unknown"
        found.at_least(f"GPU {index}, free share of its memory", free / total, 0.9)
        found.require(
            f"GPU {index}, compute capability",
            f"{about.major}.{about.minor}",
            holds=(about.major, about.minor) >= BF16_CAPABILITY,
            otherwise=f"GPU {index} is older than Ampere: neither bf16 nor flash attention is computed there",
        )
    found.require(
        "bf16",
        str(torch.cuda.is_bf16_supported()),
        holds=torch.cuda.is_bf16_supported(),
        otherwise="torch says that this GPU has no bf16",
    )
    found.require(
        "NCCL",
        ".".join(map(str, nccl.version())) if is_nccl_available() else "none",
        holds=is_nccl_available(),
        otherwise="this torch was built without NCCL",
    )
    pairs = list(permutations(range(num_gpus), 2))
    found.numbers["pairs of GPUs with peer access"] = (
        f"{sum(torch.cuda.can_device_access_peer(*pair) for pair in pairs)} of {len(pairs)}"
    )
    ones = torch.ones(1024, 1024, device="cuda", dtype=torch.bfloat16)
    product = float((ones @ ones)[0, 0])
    found.require(
        "a product in bf16", product, holds=product == 1024.0, otherwise="a product of ones is wrong"
    )
