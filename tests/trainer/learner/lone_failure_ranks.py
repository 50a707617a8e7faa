"""One rank of a learner of two, as if alone on its machine: one of them fails and the other does not.

`python -m tests.trainer.learner.lone_failure_ranks MODEL RESULTS HOW`, where HOW is what rank 1 does in the last step: `raise` or `stick`.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch

from tests.trainer.learner.tiny import config, train
from trainer.learner import backend, checkpoint, directories, export
from trainer.learner.megatron import Learner

RANK = int(os.environ.get("RANK", 0))


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """By one rank."""

    errors: dict[str, str]  # by what was done
    steps: dict[str, tuple[float, float]]  # loss and gradient norm of the step after it
    left: list[str]  # files and directories at the end


def failing(rank: int, owner: Any, name: str) -> Any:
    """In the block, `owner.name` fails on one rank."""
    error = RuntimeError("CUDA error: out of memory")
    return mock.patch.object(owner, name, side_effect=error if rank == RANK else getattr(owner, name))


def attempts(learner: Learner, results: Path) -> dict[str, Callable[[], None]]:
    """Each fails on one rank by itself."""

    def broken(rank: int, owner: Any, name: str, action: Callable[..., None], *arguments: Any) -> None:
        with failing(rank, owner, name):
            action(*arguments)

    file = results / "file"
    file.touch()
    kept = results / "kept"
    return {
        "export into a file": lambda: learner.export(file / "v1"),
        "export, renamed": lambda: broken(0, directories, "commit", learner.export, kept / "v1"),
        "export, written": lambda: broken(1, export, "write_safetensors", learner.export, kept / "v1"),
        "save into a file": lambda: learner.save(file / "step", b""),
        "save, copied": lambda: broken(1, checkpoint, "_moved_to_host", learner.save, kept / "step", b""),
        "save, written": lambda: broken(1, checkpoint, "_write_bucket", learner.save, kept / "step", b""),
        "save, renamed": lambda: broken(0, directories, "commit", learner.save, kept / "step", b""),
    }


def seen_late(results: Path) -> Path:
    """A directory that rank 1 sees later than rank 0 does."""
    (real := results / "real").mkdir(exist_ok=True)
    if RANK == 0:
        return real
    late = results / "late"
    threading.Timer(2.0, late.symlink_to, [real]).start()
    return late


def stick() -> None:
    time.sleep(3600)


def raise_alone() -> None:
    raise RuntimeError("rank 1 is broken")


def main() -> None:
    end = {"stick": stick, "raise": raise_alone}
    model, results, how = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    if how == "stick":
        backend.COLLECTIVE_TIMEOUT = timedelta(seconds=5)
    backend.join(rank=RANK, world_size=2)
    learner = Learner(config(distributed_optimizer=True), model_directory=model)
    train(learner, 1)
    errors, steps = {}, {}
    for name, attempt in attempts(learner, results).items() if how == "raise" else ():
        try:
            attempt()
        except OSError as error:
            errors[name] = str(error)
        (steps[name],) = train(learner, 1)
    if how == "raise":
        place = seen_late(results)
        learner.export(place / "v1")
        learner.save(place / "step", b"late")
        assert learner.restore(place / "step") == b"late"
    left = sorted(path.name for folder in ("kept", "real") for path in (results / folder).glob("*"))
    (results / f"rank-{RANK}.json").write_bytes(
        msgspec.json.encode(Seen(errors=errors, steps=steps, left=left))
    )
    with mock.patch.object(learner._updater, "apply", end[how]) if RANK == 1 else contextlib.nullcontext():
        train(learner, 1)


if __name__ == "__main__":
    main()
