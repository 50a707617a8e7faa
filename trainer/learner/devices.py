"""The GPUs and hosts of a plan: the known GPUs, and those that the command line and the recipe's table [plan] declare.

For each GPU, the table has its memory, its peak speed, and the speeds of its links. Memory is what `nvidia-smi` reports as total, which is
less than the number in the name. Peak speeds are NVIDIA's, of dense bf16 matrix products; its data sheets print twice as much for
"sparsity". Links are counted in one direction; data sheets print the sum of both. Nothing here imports torch.
"""

import re
from typing import Self

import msgspec

MIB = 2**20


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of GPU."""

    name: str  # the name in `--gpus`: the chip and its memory in gigabytes
    memory_bytes: int  # memory of one GPU
    flops_per_s: float  # peak speed of dense bf16 matrix products
    memory_bytes_per_s: float
    pcie_bytes_per_s: float  # speed to the host, one direction
    # Speed to the other GPUs of its node, one direction: NVLink, or PCIe where there is none.
    link_bytes_per_s: float
    compute_capability: tuple[int, int]
    source: str  # where the numbers are from

    @property
    def has_fp8(self) -> bool:
        """Whether it computes products of numbers in FP8."""
        return self.compute_capability >= (8, 9)

    @property
    def is_blackwell(self) -> bool:
        return self.compute_capability >= (10, 0)


# PCIe 4.0 x16 carries 32 GB/s in one direction, PCIe 5.0 x16 64 GB/s.
# fmt: off
_TABLE = (
    # name, memory in MiB, TFLOP/s, then GB/s: memory, PCIe, link; compute capability; source
    ("A100-40",      40960,   312, 1555, 32, 300, (8, 0), "NVIDIA A100 data sheet, SXM4 40 GB"),
    ("A100-80",      81920,   312, 2039, 32, 300, (8, 0), "NVIDIA A100 data sheet, SXM4 80 GB"),
    ("A800-80",      81920,   312, 2039, 32, 200, (8, 0), "NVIDIA A800: an A100 80 GB with 400 GB/s of NVLink"),
    ("H100-80",      81559, 989.4, 3350, 64, 450, (9, 0), "NVIDIA H100 data sheet, SXM5 80 GB"),
    ("H100PCIE-80",  81559,   756, 2000, 64,  64, (9, 0), "NVIDIA H100 data sheet, PCIe; its NVLink joins two only, so PCIe counts"),
    ("H800-80",      81559, 989.4, 3350, 64, 200, (9, 0), "NVIDIA H800: an H100 SXM5 with 400 GB/s of NVLink"),
    ("H20-96",       97871,   148, 4000, 64, 450, (9, 0), "NVIDIA H20 data sheet"),
    ("H200-141",    143771, 989.4, 4800, 64, 450, (9, 0), "NVIDIA H200 data sheet, SXM5"),
    ("B200-180",    183359,  2250, 7700, 64, 900, (10, 0), "NVIDIA HGX B200 data sheet, eight: 1.44 TB, 62 TB/s, 36 PFLOP/s sparse bf16"),
    ("L40S-48",      46068,   362,  864, 32,  32, (8, 9), "NVIDIA L40S data sheet; it has no NVLink"),
    ("A6000-48",     49140, 154.8,  768, 32,  32, (8, 6), "NVIDIA RTX A6000 data sheet; its NVLink joins two only, so PCIe counts"),
    ("RTX4090-24",   24564, 165.2, 1008, 32,  32, (8, 9), "NVIDIA Ada architecture white paper, with fp32 accumulation; it has no NVLink"),
    ("A10-24",       23028,   125,  600, 32,  32, (8, 6), "NVIDIA A10 data sheet; it has no NVLink"),
)
# fmt: on
DEVICES: dict[str, Device] = {
    name: Device(
        name=name,
        memory_bytes=mib * MIB,
        flops_per_s=tflops * 1e12,
        memory_bytes_per_s=memory * 1e9,
        pcie_bytes_per_s=pcie * 1e9,
        link_bytes_per_s=link * 1e9,
        compute_capability=capability,
        source=source,
    )
    for name, mib, tflops, memory, pcie, link, capability, source in _TABLE
}
"""Every GPU that plans can use, by its name."""

# Chips that CUDA gives another name than this table.
_CHIPS = {"RTXA6000": "A6000", "4090": "RTX4090", "GEFORCERTX4090": "RTX4090"}


def find_device(name: str) -> Device:
    """The GPU of this name, as in "H100-80" or "h100-80". Raises ValueError for one that is not known, with those that are."""
    found = DEVICES.get(name.upper())
    if found is None:
        raise ValueError(f"no GPU is known as {name!r}; known are {', '.join(DEVICES)}")
    return found


def recognise(cuda_name: str, memory_bytes: int) -> Device | None:
    """The GPU that CUDA calls `cuda_name`, as in "NVIDIA H100 80GB HBM3", and that has about this much memory; None if it is not in the
    table.

    It does not guess: the peak speed of another GPU would make every utilisation wrong.
    """
    words = [word for word in re.split(r"[\s_-]+", cuda_name.upper()) if word and word != "NVIDIA"]
    chips = {*words, "".join(words[:2]), "".join(words[:3])}
    if "PCIE" in words:
        chips = {"H100PCIE"} if "H100" in chips else chips
    chips |= {_CHIPS[chip] for chip in chips & _CHIPS.keys()}
    for device in DEVICES.values():
        # CUDA reports a little less memory than nvidia-smi; the two kinds of A100 differ by half.
        if device.name.split("-")[0] in chips and abs(memory_bytes / device.memory_bytes - 1) < 0.1:
            return device
    return None


GIB = 2**30
GIB_PER_CORE = 4
"""Memory per core of a host for sandboxes if none is given, as in general-purpose machines of the clouds."""


class GpuGroup(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs of one kind."""

    count: int
    device: Device

    def __str__(self) -> str:
        return f"{self.count}x{self.device.name}"


class Gpus(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs of a run: those of the learner, and those of the engines."""

    learner: GpuGroup
    engines: GpuGroup
    num_reserved: int  # GPUs that neither of them uses

    @classmethod
    def parse(cls, text: str, *, num_learner: int, num_reserved: int) -> Self:
        """Reads "16xH100-80", or "8xH100-80+16xL40S-48" if engines have GPUs of another kind.

        `num_learner` of the GPUs are the learner's; 0 means half of those that are not reserved, or the first group of
        two. Raises ValueError.
        """
        first, *more = (_group(part) for part in text.split("+"))
        if len(more) > 1:
            raise ValueError(
                f"--gpus {text}: give one group, or two: the learner's and the engines', as in 8xH100-80+16xL40S-48"
            )
        if more:
            return cls._of_two(first, more[0], text, num_learner=num_learner, num_reserved=num_reserved)
        num_free = first.count - num_reserved
        num_learner = num_learner or max(num_free // 2, 1)
        if num_learner >= num_free:
            raise ValueError(
                f"--gpus {text}: {num_learner} for the learner (plan.learner_gpus) and {num_reserved} reserved (plan.reserved_gpus) "
                "leave none for the engines: lower one of the two, or give more GPUs"
            )
        return cls(
            learner=GpuGroup(count=num_learner, device=first.device),
            engines=GpuGroup(count=num_free - num_learner, device=first.device),
            num_reserved=num_reserved,
        )

    @classmethod
    def _of_two(
        cls, learner: GpuGroup, engines: GpuGroup, text: str, *, num_learner: int, num_reserved: int
    ) -> Self:
        if num_learner not in (0, learner.count):
            raise ValueError(
                f"--gpus {text}: the first group is the learner's, {learner.count} GPUs, but plan.learner_gpus = {num_learner}: "
                "make them equal, or leave plan.learner_gpus out"
            )
        if num_reserved >= engines.count:
            raise ValueError(
                f"--gpus {text}: plan.reserved_gpus = {num_reserved} leaves none for the engines: lower it"
            )
        engines = GpuGroup(count=engines.count - num_reserved, device=engines.device)
        return cls(learner=learner, engines=engines, num_reserved=num_reserved)


class Hosts(msgspec.Struct, frozen=True, kw_only=True):
    """The hosts of the sandboxes, all of the same size."""

    count: int
    cores: int  # cores of one host
    memory_bytes: int  # memory of one host

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads "4x64", four hosts of 64 cores, or "4x64x512" with 512 GiB of memory each. Raises ValueError."""
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:x([1-9]\d*))?", text.strip())
        if match is None:
            raise ValueError(
                f"--hosts {text}: write hosts and the cores of one, as in 4x64, or with GiB of memory too, as in 4x64x256"
            )
        cores = int(match[2])
        memory_gib = int(match[3]) if match[3] else cores * GIB_PER_CORE
        return cls(count=int(match[1]), cores=cores, memory_bytes=memory_gib * GIB)


def _group(text: str) -> GpuGroup:
    match = re.fullmatch(r"([1-9]\d*)x([\w-]+)", text.strip())
    if match is None:
        raise ValueError(f"--gpus {text}: write how many and which, as in 16xH100-80")
    return GpuGroup(count=int(match[1]), device=find_device(match[2]))
