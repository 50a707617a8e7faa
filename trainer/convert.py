"""Turn Hugging Face weights into a Megatron checkpoint (`torch_dist`), a checkpoint of a run back into Hugging Face weights, a published
version that is adapters alone into whole weights, or Hugging Face weights into such in FP8.

The kind of SOURCE decides the direction. A model that one process cannot hold is divided among several with `torchrun` and the layout's
options; the layout need not be the one that the checkpoint was written in, or will be read in.
"""

import argparse
import sys
import warnings
from pathlib import Path

from pipeline.commandline import directory, program
from trainer import process
from trainer.learner.config import LearnerConfig
from trainer.process import TrainerSettings


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    return process.exit_status(lambda settings: convert(options, settings))


def convert(options: argparse.Namespace, settings: TrainerSettings) -> int:
    """Converts on every rank. Raises ValueError for a source of neither kind, or for a target that already exists."""
    source, target, model = options.source, options.target, options.model
    is_checkpoint, is_adapter = (
        (source / name).exists() for name in ("metadata.json", "adapter_config.json")
    )
    if not is_checkpoint and not is_adapter and not (source / "config.json").exists():
        raise ValueError(
            f"{source} holds none of config.json, metadata.json and adapter_config.json: give a Hugging Face directory, a checkpoint or "
            "adapters"
        )
    if (is_checkpoint or is_adapter) and model is None:
        raise ValueError(
            f"{source} is {'a checkpoint' if is_checkpoint else 'adapters'}, without config and tokenizer: give --model, the directory "
            "that was trained"
        )
    if target.exists():
        raise ValueError(f"{target} exists: remove it, or give another name")
    if options.fp8 and (is_checkpoint or is_adapter):
        raise ValueError(
            f"--fp8: {source} holds no whole weights; write it as Hugging Face weights first, and give these"
        )
    if options.fp8 or is_adapter:
        if settings.rank == 0:
            _rewrite(source, target, adapted=model if is_adapter else None)
            print(target)
        return 0
    config = LearnerConfig(
        lr=1.0,  # required and unused, because nothing is trained
        dtype=options.dtype,
        tensor_parallel=options.tensor_parallel,
        sequence_parallel=options.tensor_parallel > 1,  # models with experts require it
        pipeline_parallel=options.pipeline_parallel,
        expert_parallel=options.expert_parallel,
    )
    # At every start it lists the optional packages that it was built without.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    from trainer.learner import backend, export

    backend.join(rank=settings.rank, world_size=settings.world_size, local_rank=settings.local_rank)
    try:
        if is_checkpoint:
            export.to_hugging_face(source, target, config, model_directory=model)
        else:
            export.to_checkpoint(source, target, config)
    finally:
        backend.leave()
    if settings.rank == 0:
        print(target)
    return 0


def _rewrite(source: Path, target: Path, *, adapted: Path | None) -> None:
    """Converts file by file, without Megatron: adapters of the model in `adapted` to whole weights, or weights to FP8."""
    if adapted is not None:
        from trainer.learner.merge import merge

        merge(source, adapted, target)
        return
    from trainer.learner.fp8 import write_fp8

    write_fp8(source, target)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program("trainer.convert"), description=__doc__)
    parser.add_argument(
        "source",
        type=directory,
        metavar="SOURCE",
        help="a Hugging Face directory, a checkpoint, or adapters in PEFT's format",
    )
    parser.add_argument("target", type=Path, metavar="TARGET", help="the directory to write")
    parser.add_argument(
        "--model",
        type=Path,
        help="for a checkpoint or adapters: the Hugging Face directory whose model was trained; config and tokenizer are taken from it",
    )
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp32"),
        default="bf16",
        help="type of the weights in a new checkpoint, as learner.dtype of the recipe that reads it; default bf16. "
        "Hugging Face weights get the type that they have in the checkpoint",
    )
    parser.add_argument(
        "--fp8",
        action="store_true",
        help="write the Hugging Face weights in SOURCE in FP8 to TARGET, with a scale for each block of 128 x 128, for a recipe with "
        'weights.precision = "fp8" and its engines',
    )
    for name in ("tensor", "pipeline", "expert"):
        parser.add_argument(
            f"--{name}-parallel",
            type=int,
            default=1,
            metavar="N",
            help=f"as learner.{name}_parallel; default 1",
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
