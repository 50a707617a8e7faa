"""The command `swerve`: one word for each program of ours, `swerve train` for `python -m trainer.run`.

A table and nothing more: it starts the module that owns the command, just as `python -m` does, with the arguments as they are. It is
outside of the packages because it names modules of all of them, which no package may import.
"""

import difflib
import importlib.metadata
import runpy
import sys
import tomllib
from pathlib import Path

# word: (module, its first arguments, what it does)
COMMANDS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "train": ("trainer.run", (), "train on a recipe, or resume a run"),
    "plan": ("trainer.plan", (), "say whether a run fits its machines, and how fast it is"),
    "evaluate": ("trainer.evaluate", (), "evaluate weights on held-out tasks, without a run"),
    "compare": ("trainer.compare", (), "is one recipe better than another?"),
    "power": ("trainer.compare.power", (), "how many tasks, episodes and seeds would tell"),
    "rollouts": ("trainer.rollouts", (), "export kept rollouts for other tools"),
    "report": ("trainer.report", (), "sum up a run"),
    "where": ("pipeline.where", (), "where the time of a run went, and what would help most"),
    "judge-report": ("trainer.judge", ("report",), "what a run's judge is worth"),
    "replay": ("trainer.replay", (), "kept rollouts of a run through the learner again"),
    "curve": ("trainer.curve", (), "draw a run's rewards"),
    "convert": ("trainer.convert", (), "turn Hugging Face weights into a Megatron checkpoint, or back"),
    "tasks": ("workers.tasksets", (), "import and export tasks"),
    "work": ("workers.run", (), "run one worker"),
    "judge": ("workers.judge", (), "run one judge"),
    "verify": ("workers.verify", (), "try tasks and their known fixes with the grader"),
    "grade": ("workers.grade", (), "grade patches from elsewhere with the grader of training"),
    "play": ("workers.play", (), "play one episode by hand, and watch it"),
    "agent": ("workers.agent", (), "say what becomes of each key of an agent file"),
    "images": ("workers.images", (), "pull, build, list and evict task images"),
    "harness": ("workers.harness", (), "agent programs that play: build, list and check"),
    "leaks": ("workers.leaks", (), "look for the answer in the containers of tasks"),
    "templates": ("pipeline.templates", (), "what becomes of chat templates"),
    "reap": ("workers.reap", (), "remove what killed workers left on Docker hosts"),
    "engine": ("infra.serving.engine", (), "start an SGLang engine"),
    "certify": ("infra.serving.check", (), "check engines and router before a run depends on them"),
    "router": ("infra.serving.router", (), "start the router in front of the engines"),
    "status": ("pipeline", ("status",), "what trainer, workers and queue are doing"),
    "ls": ("pipeline", ("ls",), "list requests"),
    "show": ("pipeline", ("show",), "one request and its trajectory"),
    "tail": ("pipeline", ("tail",), "the last finished trajectories"),
    "explain": ("pipeline", ("explain",), "every event in the life of a request"),
    "trace": ("pipeline", ("trace",), "where the time of one rollout went"),
    "top": ("pipeline", ("top",), "the fleet, live"),
    "web": ("infra.web", (), "pages that show runs live in a browser"),
    "dead": ("pipeline", ("dead",), "dead-lettered requests"),
    "requeue": ("pipeline", ("requeue",), "give dead-lettered requests new tries"),
    "drop": ("pipeline", ("drop",), "delete dead-lettered requests"),
    "forget": ("pipeline", ("forget",), "delete all that Redis holds of a run"),
}


def main() -> int:
    """Runs the command named first. Its exit status is ours."""
    words = sys.argv[1:]
    # As `python -m` has it while it looks for the module; the module's file takes the place of "-m".
    sys.argv[0] = "-m"
    from pipeline.commandline import MISUSE, started_by_swerve  # now, for its package guards what is printed

    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0 if words else MISUSE
    if words[0] == "--version":
        print(f"swerve {_version()}")
        return 0
    if words[0] not in COMMANDS:
        print(f"error: swerve has no command {words[0]!r}; {_suggestion(words[0])}", file=sys.stderr)
        return MISUSE
    module, first, _ = COMMANDS[words[0]]
    started_by_swerve(module, first, words[0])
    sys.argv[1:] = [*first, *words[1:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def _suggestion(word: str) -> str:
    near = difflib.get_close_matches(word, [*COMMANDS, "--version", "--help"], n=1, cutoff=0.5)
    return f"did you mean swerve {near[0]}?" if near else "see swerve --help"


def _version() -> str:
    """The version of the checkout that is run, which may be another than the installed one."""
    project = Path(__file__).with_name("pyproject.toml")
    if project.is_file():
        return tomllib.loads(project.read_text())["project"]["version"]
    return importlib.metadata.version("swerve")


def _usage() -> str:
    rows = [(word, about, " ".join((module, *first))) for word, (module, first, about) in COMMANDS.items()]
    lines = [f"  {word:12} {about:55} python -m {module}" for word, about, module in rows]
    return "\n".join(["usage: swerve COMMAND ...    (swerve COMMAND --help says more)", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
