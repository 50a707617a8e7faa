"""The transport that a recipe names."""

from contextlib import AsyncExitStack
from pathlib import Path

from trainer.recipe.schema import WeightsRecipe
from trainer.weights.delta import DeltaTransport
from trainer.weights.disk import DiskTransport, Export
from trainer.weights.distributed import DistributedTransport
from trainer.weights.receivers import Receivers
from trainer.weights.transport import WeightTransport


async def open_transport(
    recipe: WeightsRecipe, run_id: str, *, directory: Path, export: Export, keep: int, stack: AsyncExitStack
) -> WeightTransport:
    """Versions are exported to `directory`, which the trainer's rank 0 can read; `stack` closes the connections."""
    disk = DiskTransport(run_id, directory=directory, export=export, keep=keep)
    match recipe.transport:
        case "disk":
            return disk
        case "delta":
            receivers = await stack.enter_async_context(Receivers(recipe.receiver_port))
            return DeltaTransport(disk, receivers, directory=directory / "patches")
        case "distributed":
            distributed = DistributedTransport(disk)
            stack.push_async_callback(distributed.aclose)
            return distributed
