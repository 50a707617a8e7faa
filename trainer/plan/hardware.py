"""What a run is planned for, as the command line and the recipe's table [plan] give it: GPUs, and hosts for sandboxes."""

import re
from typing import Self

import msgspec

from trainer.plan.devices import Device, find_device

GIB = 2**30
GIB_PER_CORE = 4
"""Memory of a host for sandboxes where none is given, as general-purpose machines of the clouds have it."""


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
    num_reserved: int  # GPUs that are neither

    @classmethod
    def parse(cls, text: str, *, num_learner: int, num_reserved: int) -> Self:
        """From "16xH100-80", or "8xH100-80+16xL40S-48" where engines have GPUs of another kind.

        `num_learner` of the GPUs are the learner's; 0 stands for half of those that are not reserved, or for the first group of
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
    """The hosts of the sandboxes, all alike."""

    count: int
    cores: int  # of one host
    memory_bytes: int  # of one host

    @classmethod
    def parse(cls, text: str) -> Self:
        """From "4x64", four hosts of 64 cores, or "4x64x512" with 512 GiB of memory each. Raises ValueError."""
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
