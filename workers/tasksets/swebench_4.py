"""Renders rows without an eval script with swebench 4.1.0. rendering.py starts it in a separate process:

    python -I -S swebench_4.py DIRECTORY <rows.json >answers.json

DIRECTORY holds the packages swebench and unidiff. Rows and answers are JSON lists in the same order; an answer has `eval_script` and
`log_parser`, or `refused`, the reason. Nothing is downloaded: packages that could download something are replaced by empty modules.
"""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ENVIRONMENT = "testbed"
HEAD = ("#!/bin/bash", "set -uxo pipefail")
# Importing these packages imports Docker, Modal and others.
PACKAGES = ("swebench", "swebench.harness", "swebench.harness.test_spec")
ABSENT = {
    "datasets": ("Dataset", "load_dataset", "load_from_disk"),
    "requests": (),
    "dotenv": ("load_dotenv",),
}


def _stand_in(directory: Path) -> None:
    sys.path.insert(0, str(directory))
    for name in PACKAGES:
        package = ModuleType(name)
        package.__path__ = [str(directory.joinpath(*name.split(".")))]
        sys.modules[name] = package
    for name, attributes in ABSENT.items():
        sys.modules[name] = ModuleType(name)
        for attribute in attributes:
            setattr(sys.modules[name], attribute, lambda: None)


def _answer(row: dict[str, Any], constants: Any, scripts: Any, parsers: dict[str, Any]) -> dict[str, str]:
    repo, version = row["repo"], row["version"]
    specs = constants.MAP_REPO_VERSION_TO_SPECS.get(repo)
    if specs is None or repo not in parsers:
        return {"refused": f"repo: swebench 4.1.0 has no tests for {repo!r}"}
    if version not in specs:
        return {"refused": f"version: swebench 4.1.0 knows {', '.join(specs)} of {repo}, not {version!r}"}
    try:
        commands = scripts.make_eval_script_list(
            row, specs[version], ENVIRONMENT, f"/{ENVIRONMENT}", row["base_commit"], row["test_patch"]
        )
    except (KeyError, ValueError, TypeError, IndexError, sys.modules["unidiff"].UnidiffParseError) as error:
        return {"refused": f"test_patch: swebench 4.1.0 cannot make a script of it: {error!r}"}
    return {"eval_script": "\n".join((*HEAD, *commands)) + "\n", "log_parser": parsers[repo].__name__}


def main() -> None:
    _stand_in(Path(sys.argv[1]))
    constants = importlib.import_module("swebench.harness.constants")
    scripts = importlib.import_module("swebench.harness.test_spec.create_scripts")
    parsers = importlib.import_module("swebench.harness.log_parsers").MAP_REPO_TO_PARSER
    json.dump([_answer(row, constants, scripts, parsers) for row in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
