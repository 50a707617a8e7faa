"""The shape of a recipe's model: from its own directory, or, before it is downloaded, from the published `config.json` of its name.

`trainer/plan/models/` holds the configurations of known models, without weights.
"""

from pathlib import Path

from trainer.learner.architecture import Architecture, read_architecture

KNOWN = Path(__file__).parent / "models"


def known_models() -> list[str]:
    return sorted(path.name for path in KNOWN.iterdir() if path.is_dir())


def shape_of(model: str) -> tuple[Architecture, bool]:
    """The architecture of the model in directory `model`, and whether it was read there rather than taken from the known ones.

    Raises ValueError if the directory is missing and its name is that of no known model.
    """
    directory = Path(model)
    if (directory / "config.json").exists():
        return read_architecture(directory), True
    names = {name.lower(): name for name in known_models()}
    name = names.get(directory.name.lower())
    if name is None:
        raise ValueError(
            f"model: {directory} has no config.json, and {directory.name} is none of the models whose shape is known "
            f"({', '.join(names.values())}): put the model's config.json there; weights are not needed to plan"
        )
    return read_architecture(KNOWN / name), False
