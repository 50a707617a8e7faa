"""The GPUs that a plan knows: memory, peak speed, and how fast bytes leave them.

Memory is what `nvidia-smi` reports as total, which is less than the number in the name. Peak speeds are NVIDIA's, of dense bf16
matrix products; its data sheets print twice as much for "sparsity". Links are counted in one direction; data sheets print the
sum of both. Nothing here imports torch.
"""

import re

import msgspec

MIB = 2**20


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of GPU."""

    name: str  # as `--gpus` has it: the chip and the gigabytes in its name
    memory_bytes: int  # of one GPU
    flops_per_s: float  # peak of dense bf16 matrix products
    memory_bytes_per_s: float
    pcie_bytes_per_s: float  # to the host, one direction
    link_bytes_per_s: (
        float  # to the other GPUs of its node, one direction: NVLink, or PCIe where there is none
    )
    source: str  # where the numbers are from


def _device(
    name: str, *, mib: int, tflops: float, memory_gb_s: float, pcie_gb_s: float, link_gb_s: float, source: str
) -> Device:
    return Device(
        name=name,
        memory_bytes=mib * MIB,
        flops_per_s=tflops * 1e12,
        memory_bytes_per_s=memory_gb_s * 1e9,
        pcie_bytes_per_s=pcie_gb_s * 1e9,
        link_bytes_per_s=link_gb_s * 1e9,
        source=source,
    )


# PCIe 4.0 x16 carries 32 GB/s in one direction, PCIe 5.0 x16 64 GB/s.
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _device(
            "A100-40",
            mib=40960,
            tflops=312,
            memory_gb_s=1555,
            pcie_gb_s=32,
            link_gb_s=300,
            source="NVIDIA A100 data sheet, SXM4 40 GB",
        ),
        _device(
            "A100-80",
            mib=81920,
            tflops=312,
            memory_gb_s=2039,
            pcie_gb_s=32,
            link_gb_s=300,
            source="NVIDIA A100 data sheet, SXM4 80 GB",
        ),
        _device(
            "A800-80",
            mib=81920,
            tflops=312,
            memory_gb_s=2039,
            pcie_gb_s=32,
            link_gb_s=200,
            source="NVIDIA A800: an A100 80 GB with 400 GB/s of NVLink",
        ),
        _device(
            "H100-80",
            mib=81559,
            tflops=989.4,
            memory_gb_s=3350,
            pcie_gb_s=64,
            link_gb_s=450,
            source="NVIDIA H100 data sheet, SXM5 80 GB",
        ),
        _device(
            "H100PCIE-80",
            mib=81559,
            tflops=756,
            memory_gb_s=2000,
            pcie_gb_s=64,
            link_gb_s=64,
            source="NVIDIA H100 data sheet, PCIe 80 GB; its NVLink bridge joins two only, so PCIe counts",
        ),
        _device(
            "H800-80",
            mib=81559,
            tflops=989.4,
            memory_gb_s=3350,
            pcie_gb_s=64,
            link_gb_s=200,
            source="NVIDIA H800: an H100 SXM5 with 400 GB/s of NVLink",
        ),
        _device(
            "H20-96",
            mib=97871,
            tflops=148,
            memory_gb_s=4000,
            pcie_gb_s=64,
            link_gb_s=450,
            source="NVIDIA H20 data sheet",
        ),
        _device(
            "H200-141",
            mib=143771,
            tflops=989.4,
            memory_gb_s=4800,
            pcie_gb_s=64,
            link_gb_s=450,
            source="NVIDIA H200 data sheet, SXM5",
        ),
        _device(
            "B200-180",
            mib=183359,
            tflops=2250,
            memory_gb_s=7700,
            pcie_gb_s=64,
            link_gb_s=900,
            source="NVIDIA HGX B200 data sheet: eight GPUs have 1.44 TB, 62 TB/s and 36 PFLOP/s of sparse bf16",
        ),
        _device(
            "L40S-48",
            mib=46068,
            tflops=362,
            memory_gb_s=864,
            pcie_gb_s=32,
            link_gb_s=32,
            source="NVIDIA L40S data sheet; it has no NVLink",
        ),
        _device(
            "A6000-48",
            mib=49140,
            tflops=154.8,
            memory_gb_s=768,
            pcie_gb_s=32,
            link_gb_s=32,
            source="NVIDIA RTX A6000 data sheet; its NVLink bridge joins two only, so PCIe counts",
        ),
        _device(
            "RTX4090-24",
            mib=24564,
            tflops=165.2,
            memory_gb_s=1008,
            pcie_gb_s=32,
            link_gb_s=32,
            source="NVIDIA Ada architecture white paper, with fp32 accumulation; it has no NVLink",
        ),
        _device(
            "A10-24",
            mib=23028,
            tflops=125,
            memory_gb_s=600,
            pcie_gb_s=32,
            link_gb_s=32,
            source="NVIDIA A10 data sheet; it has no NVLink",
        ),
    )
}
"""By name."""

# What CUDA calls a chip whose name here is another.
_CHIPS = {"RTXA6000": "A6000", "4090": "RTX4090", "GEFORCERTX4090": "RTX4090"}


def find_device(name: str) -> Device:
    """The GPU of this name, as in "H100-80" or "h100-80". Raises ValueError for one that is not known, with those that are."""
    found = DEVICES.get(name.upper())
    if found is None:
        raise ValueError(f"no GPU is known as {name!r}; known are {', '.join(DEVICES)}")
    return found


def recognise(cuda_name: str, memory_bytes: int) -> Device | None:
    """The GPU that CUDA calls `cuda_name`, as in "NVIDIA H100 80GB HBM3", and that has about so much memory; None for another.

    Nothing is guessed: a peak speed of another GPU would make every share of it wrong.
    """
    words = [word for word in re.split(r"[\s_-]+", cuda_name.upper()) if word and word != "NVIDIA"]
    chips = {*words, "".join(words[:2]), "".join(words[:3])}
    if "PCIE" in words:
        chips = {"H100PCIE"} if "H100" in chips else chips
    chips |= {_CHIPS[chip] for chip in chips & _CHIPS.keys()}
    for device in DEVICES.values():
        # CUDA keeps a little back of what nvidia-smi reports; the two A100 differ by half.
        if device.name.split("-")[0] in chips and abs(memory_bytes / device.memory_bytes - 1) < 0.1:
            return device
    return None
