"""An objective of the user's own: `objective = "my.py:name"` under [learner.loss] names a function in a Python file.

It is called like our own objectives, `name(tokens, bounds)`, and returns a `PerToken`. `bounds` contains the numbers from the recipe,
without defaults. Every rank loads the file by itself. Only loading needs torch; the checks do not.
"""

import ast
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.learner.objectives.tokens import Bounds, PerToken, Tokens

WHERE = "learner.loss.objective"


def check_own(specification: str) -> None:
    """Raises ValueError unless the file can be read and defines the function. The file is not run."""
    path, name = _parts(specification)
    try:
        tree = ast.parse(path.read_text(), filename=str(path))
    except OSError as error:
        raise ValueError(
            f"{WHERE}: {path}: {error.strerror}; the path is relative to the recipe's directory"
        ) from error
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ValueError(f"{WHERE}: {path} is not Python: {error}") from error
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if name not in functions:
        raise ValueError(
            f"{WHERE}: {path} defines no function {name}; it defines {', '.join(functions) or 'none'}"
        )


class OwnObjective:
    """The user's function, with a check of its result."""

    def __init__(self, function: Any, specification: str) -> None:
        self._function = function
        self._specification = specification

    def __call__(self, tokens: "Tokens", bounds: "Bounds") -> "PerToken":
        from trainer.learner.objectives.tokens import PerToken

        found = self._function(tokens, bounds)
        if not isinstance(found, PerToken) or found.loss_P.shape != tokens.policy_logprobs_P.shape:
            raise ValueError(
                f"{WHERE}: {self._specification} must return PerToken(loss_P), with one number per position in loss_P"
            )
        return found


def load_own(specification: str) -> OwnObjective:
    """Run the file and find the function in it. Raises ValueError like `check_own`, and for an import that fails."""
    check_own(specification)
    path, name = _parts(specification)
    description = importlib.util.spec_from_file_location(f"swerve_objective_{path.stem}", path)
    assert description is not None, "a file that ends in .py has a loader"
    assert description.loader is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(description)
    try:
        description.loader.exec_module(module)
    except ImportError as error:
        raise ValueError(
            f"{WHERE}: {path} cannot be imported: {error}; install it where every rank finds it"
        ) from error
    return OwnObjective(getattr(module, name), specification)


def _parts(specification: str) -> tuple[Path, str]:
    path, _, name = specification.rpartition(":")
    return Path(path), name
