"""What a new weight version costs to send as changes: `python -m benchmarks.weight_patches [--json] [--short]`.

SmolLM2-135M in bfloat16, with fp32 main weights as in training, takes optimizer steps with the recipes' learning rate; after each it is
exported, and the patch from the version before is written and applied. The rival of the bytes is the whole version, that of the seconds
a copy of the directory. What is rebuilt must be byte for byte the export. --short takes a small random model.
"""

import asyncio
import filecmp
import shutil
import sys
import tempfile
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.learner_methods import LearnerRun, make_batch, write_model
from benchmarks.report import Comparison, main
from infra import smollm2
from infra.serving.receiver import open_versions
from pipeline.weight_patch import DirectoryManifest, read_blocks, read_header
from trainer.learner.config import LearnerConfig, LossConfig
from trainer.weights import delta

LR = 1e-6  # of trainer/recipes/smollm2_135m.toml
NUM_VERSIONS = 3
LONGEST_TOKENS = 128
NUM_SAMPLES = 4
RUN = "benchmark"
SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


async def benchmark(short: bool) -> list[Comparison]:
    with tempfile.TemporaryDirectory(prefix="swerve-patches-") as temporary:
        directory = Path(temporary)
        return await asyncio.to_thread(measured, directory, model_in(directory, short=short))


def model_in(directory: Path, *, short: bool) -> Path:
    model = directory / "model"
    if short:
        write_model(model, SMALL)
    else:
        model.mkdir()
        with tempfile.TemporaryDirectory() as download:
            smollm2.convert(smollm2.download_weights(Path(download)), model)
    return model


def measured(directory: Path, model: Path) -> list[Comparison]:
    config = LearnerConfig(
        lr=LR, micro_batch_tokens=LONGEST_TOKENS, dtype="bf16", loss=LossConfig(kind="reinforce")
    )
    learner = LearnerRun(config, model)
    vocab_size = msgspec.json.decode((model / "config.json").read_bytes())["vocab_size"]
    versions = [exported(learner, directory, 0)]
    found: list[Comparison] = []
    for number in range(1, NUM_VERSIONS + 1):
        learner.step(make_batch(NUM_SAMPLES, LONGEST_TOKENS, vocab_size, step=number))
        versions.append(exported(learner, directory, number))
        found += sent(directory, versions[-2], versions[-1])
    return found


def exported(learner: LearnerRun, directory: Path, version: int) -> tuple[DirectoryManifest, Path]:
    where = directory / f"v{version:06d}"
    learner.export(where)
    return delta.manifest_of(where, RUN, version), where


def sent(
    directory: Path, base: tuple[DirectoryManifest, Path], target: tuple[DirectoryManifest, Path]
) -> list[Comparison]:
    """Make the patch, apply it as a receiver does, and compare with a copy."""
    patch, what = directory / "patch", f"version {target[0].version}"
    began = time.perf_counter()
    num_bytes = delta.write_patch(patch, target, base)
    written = time.perf_counter()
    with open_versions(directory / "held", keep=2) as held:
        _, pieces = delta.whole(*base)
        stream = BytesIO(b"".join(pieces))
        held.apply(header := read_header(stream), read_blocks(stream, header.target))
        before = time.perf_counter()
        with patch.open("rb") as file:
            rebuilt = held.apply(header := read_header(file), read_blocks(file, header.target))
        applied = time.perf_counter()
    names = [file.name for file in target[0].files]
    assert filecmp.cmpfiles(rebuilt, target[1], names, shallow=False) == (names, [], [])
    copied = time.perf_counter()
    shutil.copytree(target[1], directory / "copy")
    copy_s = time.perf_counter() - copied
    shutil.rmtree(directory / "copy")
    return [
        Comparison("weight_patches", num_bytes, target[0].num_bytes, "whole version", f"bytes, {what}"),
        Comparison("weight_patches", written - began, copy_s, "copy", f"s to write the patch, {what}"),
        Comparison("weight_patches", applied - before, copy_s, "copy", f"s to rebuild and sync, {what}"),
    ]


if __name__ == "__main__":
    sys.exit(main("weight_patches", __doc__, benchmark))
