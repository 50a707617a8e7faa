"""A pretrained Llama that imitates the demonstration's teacher, all its weights trained.

The teacher's episodes are written as rows, and supervised fine-tuning trains on them (`trainer/imitation`), so the policy gets the ids that
a rollout with these replies would have. A killed command goes on from the newest checkpoint.
"""

import json
import os
import random
import shutil
from pathlib import Path

import msgspec

from trainer import run
from trainer.demo.family import make_task
from trainer.demo.lessons import Templates, teach

FIRST_PROBE = 1_000_000
"""Lessons from this number on are not used for training; they measure the result."""

RECIPE = """\
# {num_lessons} lessons of seed {seed}, {num_probes} others to measure them
kind = "sft"
name = "warmstart"
model = {model}
num_epochs = 1
[data]
train = ["train.jsonl"]
heldout = ["heldout.jsonl"]
[batch]
rows_per_step = {rows_per_step}
[learner]
lr = {peak_lr}
lr_min = {lowest_lr}
warmup_steps = {warmup_steps}
decay_steps = {num_steps}
micro_batch_tokens = 2048
[evaluation]
every_steps = {save_every_steps}
[checkpoint]
every_steps = {save_every_steps}
keep = 1
[sinks]
tensorboard = false
jsonl = false
"""


class Warmstart(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the imitation. The number of lessons, of about 440 tokens each, determines the duration."""

    seed: int = 0
    num_lessons: int = 640
    rows_per_step: int = 8
    peak_lr: float = 2e-4
    save_every_steps: int = 16
    num_probes: int = 16

    def recipe(self, model: Path) -> str:
        """The recipe that trains `model` on the rows beside it; the learning rate falls to a twentieth."""
        num_steps = -(-self.num_lessons // self.rows_per_step)
        return RECIPE.format(
            **msgspec.structs.asdict(self),
            model=json.dumps(str(model.resolve())),
            lowest_lr=self.peak_lr / 20,
            num_steps=num_steps,
            warmup_steps=min(10, num_steps // 2),
        )


def imitate(model: Path, out: Path, settings: Warmstart) -> int:
    """Train the model in `model` and write the result to `out`, completely or not at all. A complete directory is kept.

    Returns the exit status: 0 if `out` is complete. Raises ValueError for a directory without a model, and for a begun training with other
    settings.
    """
    if (out / "config.json").exists():
        print(f"{out} is complete", flush=True)
        return 0
    if settings.num_lessons < 1:
        raise ValueError(f"--lessons is {settings.num_lessons}; it must be 1 or more")
    if not (model / "config.json").is_file():
        raise ValueError(f"--model {model} holds no config.json: give a Hugging Face directory")
    partial = out.with_name(f"{out.name}.partial")
    recipe, run_dir = _prepare(partial, model, settings), partial / "run"
    resume = ["--resume"] if run_dir.exists() else []
    status = run.main([str(recipe), "--run-dir", str(run_dir), "--run-id", "warmstart", *resume])
    weights = max((run_dir / "weights").glob("v*"), default=None)
    if status or weights is None:
        print(f"{out} is not complete; the same command goes on", flush=True)
        return status or 1
    out.parent.mkdir(parents=True, exist_ok=True)
    os.replace(weights, out)
    shutil.rmtree(partial)
    print(f"the policy that imitates the teacher is in {out}", flush=True)
    return 0


def _prepare(partial: Path, model: Path, settings: Warmstart) -> Path:
    """Writes the rows and, last, their recipe into `partial`, unless they are there. Returns the recipe. Raises ValueError for another
    one.
    """
    recipe, text = partial / "recipe.toml", settings.recipe(model)
    if recipe.exists():
        if recipe.read_text() != text:
            raise ValueError(f"{partial} is of a command with other settings: repeat that, or remove it")
        return recipe
    partial.mkdir(parents=True, exist_ok=True)
    probes, templates = range(FIRST_PROBE, FIRST_PROBE + settings.num_probes), Templates()
    for name, numbers in (("train", range(settings.num_lessons)), ("heldout", probes)):
        rows = (json.dumps(lesson(settings.seed, number, templates)) for number in numbers)
        (partial / f"{name}.jsonl").write_text("".join(f"{row}\n" for row in rows))
    written = recipe.with_suffix(".new")
    written.write_text(text)
    written.replace(recipe)
    return recipe


def lesson(seed: int, number: int, templates: Templates) -> dict[str, list[dict[str, str]]]:
    """The teacher's episode on the task of that number, as a row. It depends on nothing else."""
    rng = random.Random(f"{seed}/{number}")
    messages = teach(make_task(seed, "warmstart", number), rng, templates).messages
    return {"messages": [{"role": one.role, "content": one.content} for one in messages]}
