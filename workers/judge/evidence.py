"""The rule "evidence": does a step rest on what the policy has seen, and does it check what it did?

The rule reads commands and what they printed; it runs nothing and knows nothing of the task. It sees the whole rollout, so an edit is
scored by the check that came after it. What it recognises: files shown by `cat`, `nl`, `head`, `tail`, `less`, `sed -n` and by `grep` with
context; edits by `sed -i`, `perl -i`, `patch`, `git apply`, `tee` and redirections; edits taken back by `git checkout`, `restore`, `stash`
and `reset`; test runners, and an expression about imported code that is printed.
"""

import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from pipeline.trajectory import Action, Turn
from workers.judge.command_results import Verdict, failed, verdict_of_tests
from workers.judge.shell import SimpleCommand, simple_commands

_VIEWERS = frozenset({"cat", "nl", "head", "tail", "less", "more", "bat", "batcat"})
_SEARCHES = frozenset({"grep", "egrep", "rg"})
_CONTEXT_FLAGS = ("-A", "-B", "-C", "--context", "--after-context", "--before-context")
_TAKES_BACK = frozenset({"checkout", "restore", "stash", "reset"})
_SCRATCH = "/tmp/"
_SENTINELS = ("COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", "MINI_SWE_AGENT_FINAL_OUTPUT")


def judge_by_evidence(issue: str, turns: Sequence[Turn], index: int) -> float | None:
    """The first that holds:

    -1  there is no command, one failed, or all of them were run before and nothing has changed since
    -1  an edit of a file that the policy was never shown, or whose check, run before the next change, failed;  +1  any other edit
    -1  a submission of changes that no check passed after the last of them;  +1  after a check that passed
    +1  tests were run, whatever came of them, because now it is known;  +1  a file was shown that is edited later

    Otherwise it abstains.
    """
    actions = turns[index].actions
    if not actions:
        return -1.0
    if any(_submits(action) for action in actions):
        return 1.0 if _last_verdict(turns[:index]) == "passed" else -1.0
    if any(failed(action) and verdict_of_tests(action) is None for action in actions) or _repeats(
        turns, index
    ):
        return -1.0
    if _edits(turns[index]):
        return 1.0 if _is_informed(turns, index) and _next_verdict(turns[index:]) != "failed" else -1.0
    if _verdicts(turns[index]) or _is_of_use(turns, index):
        return 1.0
    return None


@dataclass(frozen=True, slots=True)
class CommandEffect:
    """What a command line shows and changes, by its words alone."""

    shows: tuple[str, ...]  # files
    edits: tuple[str, ...]  # files that were there before
    changes: bool  # edits, writes or takes something back
    takes_back: bool  # earlier edits, and changes nothing else


def _submits(action: Action) -> bool:
    return action.observation is None and any(sentinel in action.command for sentinel in _SENTINELS)


def _verdicts(turn: Turn) -> list[Verdict]:
    return [found for action in turn.actions if (found := verdict_of_tests(action)) is not None]


def _effects(turn: Turn) -> list[CommandEffect]:
    """Of the commands that ended well."""
    return [
        effect_of(action.command)
        for action in turn.actions
        if action.observation is not None and action.observation.exit_code == 0
    ]


def _edits(turn: Turn) -> bool:
    return any(effect.changes and not effect.takes_back for effect in _effects(turn))


def _changes(turn: Turn) -> bool:
    return any(effect.changes for effect in _effects(turn))


def _last_verdict(turns: Sequence[Turn]) -> Verdict | None:
    """Of the checks behind the last change."""
    for turn in reversed(turns):
        if verdicts := _verdicts(turn):
            return verdicts[-1]
        if _changes(turn):
            return None
    return None


def _next_verdict(turns: Sequence[Turn]) -> Verdict | None:
    """Of the checks of the first turn and of those behind it, before the next change."""
    for number, turn in enumerate(turns):
        if number and _changes(turn):
            return None
        if verdicts := _verdicts(turn):
            return verdicts[-1]
    return None


def _repeats(turns: Sequence[Turn], index: int) -> bool:
    """Whether the same was done before, and nothing has changed since. An edit that is made again at once changes nothing."""
    commands = [action.command for action in turns[index].actions]
    for turn in reversed(turns[:index]):
        if [action.command for action in turn.actions] == commands:
            return True
        if _changes(turn):
            return False
    return False


def _is_informed(turns: Sequence[Turn], index: int) -> bool:
    """Whether every file that the turn edits was shown before."""
    shown = {
        posixpath.basename(path)
        for turn in turns[:index]
        for effect in _effects(turn)
        for path in effect.shows
    }
    return all(
        posixpath.basename(path) in shown for effect in _effects(turns[index]) for path in effect.edits
    )


def _is_of_use(turns: Sequence[Turn], index: int) -> bool:
    """Whether the turn shows a file that a later one edits."""
    shown = {posixpath.basename(path) for effect in _effects(turns[index]) for path in effect.shows}
    later = (path for turn in turns[index + 1 :] for effect in _effects(turn) for path in effect.edits)
    return any(posixpath.basename(path) in shown for path in later)


@lru_cache(maxsize=1024)
def effect_of(command: str) -> CommandEffect:
    commands = simple_commands(command)
    shows = tuple(path for one in commands for path in _shown(one))
    edits = tuple(path for one in commands for path in _edited(one))
    patches = any(one.words[:1] == ("patch",) or one.words[:2] == ("git", "apply") for one in commands)
    writes = patches or any(_written(one) for one in commands)
    takes_back = any(one.words[:1] == ("git",) and _TAKES_BACK & {*one.words[1:3]} for one in commands)
    return CommandEffect(
        shows, edits, bool(edits or writes or takes_back), takes_back and not (edits or writes)
    )


def _shown(command: SimpleCommand) -> Iterator[str]:
    """Files whose content the policy is shown."""
    if command.writes or command.appends or not command.words:
        return
    program, words = posixpath.basename(command.words[0]), command.words[1:]
    views = program in _VIEWERS or (program == "sed" and "-n" in words and not _is_in_place(words))
    searches = program in _SEARCHES and any(word.startswith(_CONTEXT_FLAGS) for word in words)
    if views or searches:
        yield from (word for word in words if not word.startswith("-"))


def _edited(command: SimpleCommand) -> Iterator[str]:
    """Files that were there before and are changed."""
    yield from (path for path in command.appends if not path.startswith(_SCRATCH))
    if not command.words or posixpath.basename(command.words[0]) not in ("sed", "perl"):
        return
    words = command.words[1:]
    if _is_in_place(words):
        files = [word for word in words if not word.startswith("-")]
        # The script is the first of these, also where -e stands before it.
        yield from files[1:]


def _is_in_place(words: Sequence[str]) -> bool:
    return any(word.startswith(("-i", "-pi", "-ni", "--in-place")) for word in words)


def _written(command: SimpleCommand) -> bool:
    """Whether a file of the repository is written, which may be a new one."""
    tee = command.words[1:] if command.words[:1] == ("tee",) else ()
    paths = [*command.writes, *(word for word in tee if not word.startswith("-"))]
    return any(not path.startswith(_SCRATCH) for path in paths)
