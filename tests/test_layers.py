"""Who may import whom, and who may not bring torch along."""

import ast
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Set
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT: dict[str, set[str]] = {
    "pipeline": set(),
    "workers": {"pipeline"},
    "trainer": {"pipeline"},
    "infra": {"pipeline"},
    "benchmarks": {"pipeline", "workers", "trainer", "infra"},
}
HEAVY = {"aiohttp", "docker", "megatron", "numpy", "sglang", "tokenizers", "torch", "transformers"}
# torch and megatron belong to the learner; the warm start is a learner's first hour, the benchmark compares learners, and the check of GPUs
# has one on them.
LEARNERS = (
    "trainer/learner/",
    "trainer/feed.py",
    "trainer/warmstart",
    "benchmarks/experts.py",
    "benchmarks/gpu_check/",
    "benchmarks/learner_methods.py",
    "benchmarks/simulation/",
    "benchmarks/small_models.py",
)
FILES = sorted(path.relative_to(ROOT) for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Packages that a file imports, wherever in it."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            yield (node.module or "").split(".")[0]


IMPORTED = {path: set(imported(path)) for path in FILES}


def test_there_is_something_to_look_at() -> None:
    assert {path.parts[0] for path in FILES} == MAY_IMPORT.keys()


def offenders(forbidden: Callable[[Path], Set[str]]) -> dict[str, Set[str]]:
    """The files that import what `forbidden` says of them, each with what that is."""
    found = {str(path): IMPORTED[path] & forbidden(path) for path in FILES}
    return {path: packages for path, packages in found.items() if packages}


def test_imports_point_towards_the_contract() -> None:
    assert offenders(lambda path: MAY_IMPORT.keys() - {path.parts[0]} - MAY_IMPORT[path.parts[0]]) == {}


def test_the_contract_imports_nothing_heavy() -> None:
    assert offenders(lambda path: HEAVY if path.parts[0] == "pipeline" else set()) == {}


def test_only_the_learner_and_the_engines_import_torch() -> None:
    owners = (*LEARNERS, "infra/")
    assert offenders(lambda path: set() if str(path).startswith(owners) else {"torch", "megatron"}) == {}


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("pipeline.cli.verbs", HEAVY),
        ("workers.run, workers.rollout, workers.policy.sglang, workers.grading.grade", {"torch", "megatron"}),
        ("workers.judge.__main__", {"docker", "torch", "megatron", "transformers"}),
        (
            "trainer.report.__main__, trainer.curve, trainer.records.points, trainer.recipe, trainer.weights.publish, "
            "trainer.learner.architecture",
            {"torch", "megatron"},
        ),
    ],
)
def test_a_process_without_a_learner_never_loads_torch(modules: str, absent: set[str]) -> None:
    code = f"import sys, {modules}; print(*(m for m in {sorted(absent)!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "benchmarks.gpu_check",
        "infra.web",
        "pipeline",
        "workers.judge",
        "workers.run",
        "workers.verify",
        "trainer.run",
        "trainer.replay",
        "trainer.report",
        "trainer.curve",
    ],
)
def test_help_needs_nothing_heavy(command: str) -> None:
    code = (
        "import contextlib, io, runpy, sys\n"
        "sys.argv = ['x', '--help']\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        f"    runpy.run_module({command!r}, run_name='__main__')\n"
        "print(*(m for m in ('torch', 'megatron', 'docker', 'transformers') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path, modules: Collection[str]) -> set[str]:
    """Our modules that a file imports as it is loaded or for its types, but not those that a function imports when it is called."""
    found: set[str] = set()
    statements = list(ast.parse((ROOT / path).read_text()).body)
    while statements:
        node = statements.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.If | ast.Try):
            statements += [*node.body, *node.orelse]
    return (found & set(modules)) - {module_of(path)}


@pytest.mark.parametrize("package", ["pipeline", "workers"])
def test_modules_import_one_another_in_no_circle(package: str) -> None:
    ours = {module_of(path): path for path in FILES if path.parts[0] == package}
    left = {module: imports_of(path, ours.keys()) for module, path in ours.items()}
    while leaves := {module for module, imported in left.items() if not imported & left.keys()}:
        left = {module: imported for module, imported in left.items() if module not in leaves}
    assert left == {}


def test_a_rollout_knows_nothing_of_the_queue() -> None:
    code = "import sys, workers.rollout; print(*(m for m in ('arq', 'redis', 'docker') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


MODULES = {
    ".".join(path.with_suffix("").parts).removesuffix(".__init__"): path
    for path in FILES
    if path.parts[0] != "benchmarks"
}


def imported_modules(name: str) -> set[str]:
    """Modules of ours that a module imports outside its functions, also those for type checking only."""
    found: set[str] = set()
    nodes: list[ast.AST] = [ast.parse((ROOT / MODULES[name]).read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes += ast.iter_child_nodes(node)
    # A package holds its modules, so importing it from inside is no import of another.
    return {one for one in found & MODULES.keys() if not name.startswith(f"{one}.")}


def test_no_module_imports_itself_by_way_of_others() -> None:
    imports = {name: imported_modules(name) for name in MODULES}
    while leaves := [name for name, others in imports.items() if not others & imports.keys()]:
        for name in leaves:
            del imports[name]
    assert not imports, f"these modules lie on an import circle, or import one that does: {sorted(imports)}"


TRAINER_LAYERS = (
    ("recipe", "learner.config", "batching", "learner.devices"),
    ("learner",),
    ("feed",),
    ("records",),
    ("verifications", "agent_file"),
    ("inputs",),
    ("rollouts", "weights"),
    ("process",),
    ("loop",),
    ("imitation",),
    ("plan", "where", "judge"),
    ("run", "replay", "evaluate", "compare", "report", "curve", "convert", "warmstart", "demo"),
)
"""The order inside `trainer/`, from below: a layer imports its own parts and those before it."""


def layer_of(module: str) -> tuple[int, str] | None:
    """The number of a module's layer, and its part there; None for what is in no layer."""
    name = module.removeprefix("trainer.")
    parts = {part: number for number, layer in enumerate(TRAINER_LAYERS) for part in layer}
    found = [part for part in parts if name == part or name.startswith(f"{part}.")]
    return None if not found else (parts[max(found, key=len)], max(found, key=len))


def test_every_module_of_the_trainer_is_in_a_layer() -> None:
    assert [name for name in MODULES if name.startswith("trainer.") and layer_of(name) is None] == []


def test_imports_inside_the_trainer_point_down() -> None:
    upward: dict[tuple[str, str], str] = {}
    for name, path in MODULES.items():
        importing = layer_of(name)
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if importing is None or not isinstance(node, ast.ImportFrom):
                continue
            for one in {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}:
                imported_layer = layer_of(one) if one in MODULES and one.startswith("trainer.") else None
                if imported_layer is not None and imported_layer[0] > importing[0]:
                    upward[importing[1], imported_layer[1]] = f"{name} imports {one}"
    assert upward == {}
