"""`python asking.py QUESTION < argument`: asks the mini-swe-agent of this interpreter's sys.path; answers in JSON.

A script of its own, because only one release can be imported by a process, and it imports packages that are not installed: modules
that accept everything stand in for them.
"""

import dataclasses
import importlib
import importlib.machinery
import json
import os
import pkgutil
import sys
import tempfile
import types
from typing import Any, ClassVar

ABSENT = {
    "contree_sdk",
    "datasets",
    "litellm",
    "openai",
    "portkey_ai",
    "prompt_toolkit",
    "requests",
    "swerex",
    "tenacity",
    "textual",
}


class Anything(types.ModuleType):
    """A module of which everything can be imported. Its names with a capital are classes, the others modules."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _any_class(name) if name[0].isupper() else Anything(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made

    def __call__(self, *_: Any, **__: Any) -> Any:
        return lambda function: function


def _any_class(name: str) -> Any:
    from pydantic_core import core_schema

    def accept(_: Any, *__: Any, **___: Any) -> None: ...

    fields = {
        "__init__": accept,
        "__get_pydantic_core_schema__": classmethod(lambda *_: core_schema.any_schema()),
    }
    return type(name, (Exception,), fields)


class Finder:
    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Anything:
        return Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def classes(_: Any) -> dict[str, dict[str, Any]]:
    """Keys and defaults of each configuration class of agents, environments and models, by its name."""
    found: dict[str, dict[str, Any]] = {}
    for part in ("agents", "environments", "models"):
        package = importlib.import_module(f"minisweagent.{part}")
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if info.name.endswith("interactive_textual"):  # the interactive agent again, with a screen
                continue
            module = importlib.import_module(info.name)
            for name, value in vars(module).items():
                if (
                    isinstance(value, type)
                    and name.endswith("Config")
                    and value.__module__ == module.__name__
                ):
                    found[name] = _fields(value)
    return found


def _fields(config_class: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(config_class):
        fields: dict[str, Any] = config_class.model_fields
        return {
            name: {"required": True} if one.is_required() else one.get_default(call_default_factory=True)
            for name, one in fields.items()
        }
    found = {}
    for one in dataclasses.fields(config_class):
        if one.default is not dataclasses.MISSING:
            found[one.name] = one.default
        elif one.default_factory is not dataclasses.MISSING:
            found[one.name] = one.default_factory()
        else:
            found[one.name] = {"required": True}
    return found


def class_names(_: Any) -> dict[str, Any]:
    """What model_class and environment_class may say."""
    models = importlib.import_module("minisweagent.models")
    environments = importlib.import_module("minisweagent.environments")
    return {
        "models": {
            name: path.rpartition(".")[2] for name, path in vars(models)["_MODEL_CLASS_MAPPING"].items()
        },
        "environments": sorted(vars(environments)["_ENVIRONMENT_MAPPING"]),
    }


def config_of(specs: list[str]) -> Any:
    """What 2.x makes of several --config."""
    config = importlib.import_module("minisweagent.config")
    merge = importlib.import_module("minisweagent.utils.serialize").recursive_merge
    return merge(*[config.get_config_from_spec(spec) for spec in specs])


def constants(_: Any) -> Any:
    return importlib.import_module("minisweagent.models.utils.actions_toolcall").BASH_TOOL


class Asked(KeyboardInterrupt):
    """The model was asked for its first reply. Nothing in upstream catches a KeyboardInterrupt."""


def opening(tree: dict[str, Any]) -> dict[str, Any]:
    """The messages before the first reply, or the error of upstream, for a file of one tree and the task `it {{fails}}`."""
    default = importlib.import_module("minisweagent.agents.default")
    interactive = importlib.import_module("minisweagent.agents.interactive")
    local = importlib.import_module("minisweagent.environments.local")
    models = importlib.import_module("minisweagent.models.litellm_model")

    class Model(models.LitellmModel):
        def query(self, *_: Any, **__: Any) -> Any:
            raise Asked

    try:
        place = _known(local.LocalEnvironmentConfig, tree.get("environment", {}))
        model = Model(**_known(models.LitellmModelConfig, {"model_name": "policy", **tree.get("model", {})}))
        agent = default.DefaultAgent(
            model,
            local.LocalEnvironment(**place),
            config_class=interactive.InteractiveAgentConfig,
            **tree.get("agent", {}),
        )
        agent.run("it {{fails}}")
    except Asked:
        return {"messages": [message["content"] for message in agent.messages]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {}


def _known(config_class: Any, said: dict[str, Any]) -> dict[str, Any]:
    """The keys of the file that this class has: files are also for other classes of the release."""
    return {key: value for key, value in said.items() if key in _fields(config_class)}


def main() -> None:
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
    os.environ["MSWEA_GLOBAL_CONFIG_DIR"] = tempfile.mkdtemp()
    question = globals()[sys.argv[1]]
    json.dump(question(json.load(sys.stdin)), sys.stdout, default=str)


if __name__ == "__main__":
    main()
