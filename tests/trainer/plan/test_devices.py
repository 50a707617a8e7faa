"""The GPUs that a plan knows, found by the name in `--gpus` and by the name that CUDA reports."""

import pytest

from trainer.learner.devices import DEVICES, find_device, recognise

GIB = 2**30


def test_a_gpu_is_found_by_its_name_in_either_case() -> None:
    assert find_device("H100-80") is find_device("h100-80")
    assert find_device("H100-80").flops_per_s == 989.4e12


def test_an_unknown_gpu_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match=r"no GPU is known as 'H101-80'; known are .*H100-80"):
        find_device("H101-80")


@pytest.mark.parametrize(
    ("cuda_name", "gib", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 79.2, "H100-80"),
        ("NVIDIA H100 PCIe", 79.1, "H100PCIE-80"),
        ("NVIDIA H200", 139.8, "H200-141"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "A100-80"),
        ("NVIDIA L40S", 44.5, "L40S-48"),
        ("NVIDIA RTX A6000", 47.5, "A6000-48"),
        ("NVIDIA GeForce RTX 4090", 23.6, "RTX4090-24"),
        ("NVIDIA B200", 178.4, "B200-180"),
    ],
)
def test_the_name_that_cuda_reports_is_recognised(cuda_name: str, gib: float, name: str) -> None:
    assert recognise(cuda_name, int(gib * GIB)) is DEVICES[name]


def test_a_gpu_that_is_not_known_is_not_taken_for_another() -> None:
    assert recognise("NVIDIA GeForce GTX 1080", 8 * GIB) is None
    assert recognise("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 10 * GIB) is None


def test_links_are_counted_in_one_direction_and_are_no_slower_than_pcie_4() -> None:
    assert all(32e9 <= device.pcie_bytes_per_s <= device.link_bytes_per_s for device in DEVICES.values())
