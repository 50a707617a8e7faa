"""What an author is asked for as a problem, and which of its texts are used.

Of a commit it sees people's text as cleaned, the names of the tests that fail without the fix, and what these print. Of planted bugs it
sees the text of the template. It never sees a difference, and a line that repeats one of the fix is left out of what it sees. Its texts
pass the filters that people's text and the template pass; where a filter would take something out that gives the fix away, the author is
asked again, because what is left of such a text may not be whole.
"""

import functools
import posixpath
import re
from collections.abc import Callable, Collection, Iterator

from msgspec.structs import replace

from pipeline.task import Task
from pipeline.taskfile import Gold
from workers.leaks.answers import answers_in_problem
from workers.making.author import NO_REPLY, Author, NoReply, Unusable
from workers.making.candidates import TaskCandidate
from workers.making.problems import FENCED, GIVE_AWAY, added_lines, cleaned, words_in
from workers.making.reaching import RanTest
from workers.making.symptoms import names_tests
from workers.tasksets.patches import reversed_patch

MOST_NAMES = 40
_WHOLE = re.compile(r"\A```(?:markdown|md)\n(.*)\n```\Z", re.DOTALL)
_RULES = """- Say what goes wrong, as somebody sees it who uses the code: what is called, what comes of it, what should come of it.
- Do not say how the code is to be changed, where the cause is, or what a changed line would be. You do not know it.
- Do not name tests or their files, and do not say that there are any.
- Reply with the text of the report alone, in Markdown, with a title in the first line."""
_OF_COMMIT = """Some tests of the project {repo} fail, because something in its code is wrong or missing. Write what a user of the
project would have reported about it.

{rules}
- Name everything that a right change cannot guess: names, arguments, messages and values that the tests below ask for.
- Use at least {least_words} words.

What people wrote about it, which may say little or nothing:
<text>
{people}
</text>

Tests that fail:
<tests>
{tests}
</tests>

What they print:
<output>
{failures}
</output>
"""
_OF_BUGS = """This text says what is wrong with some code. A program has written it. Write it anew, as a user of the code would have
reported it.

{rules}
- Keep every block of code and every block of output as they are, word for word.

<text>
{template}
</text>
"""


def request_of_commit(one: TaskCandidate, *, least_words: int) -> str:
    """The prompt for the problem of a commit. The task's problem is people's text as cleaned."""
    task, gold = one.task, one.gold
    assert task is not None
    assert gold is not None
    names = [*one.failing[:MOST_NAMES], *(["..."] if len(one.failing) > MOST_NAMES else [])]
    added = added_lines(gold.patch)
    people, tests, failures = (
        _without(text, added) for text in (task.problem, "\n".join(names), one.failures)
    )
    return _OF_COMMIT.format(
        repo=posixpath.basename(task.repo).removesuffix(".git"),
        rules=_RULES,
        least_words=least_words,
        people=people,
        tests=tests,
        failures=failures,
    )


def request_of_bugs(template: str) -> str:
    """The prompt for the problem of planted bugs."""
    return _OF_BUGS.format(rules=_RULES, template=template)


def report_of_commit(
    text: str, one: TaskCandidate, is_given_away: Callable[[str], bool], *, least_words: int
) -> tuple[str, tuple[str, ...]]:
    """The problem that an author wrote of a commit, and what was taken out of it. Raises Unusable."""
    task, gold = one.task, one.gold
    assert task is not None
    assert gold is not None
    text, removed = cleaned(_unwrapped(text), gold.patch, is_given_away)
    if any(part.startswith(GIVE_AWAY) for part in removed):
        raise Unusable("it says how the code is to be changed")
    if (num_words := words_in(text)) < least_words:
        raise Unusable(f"it has {num_words} words, and {least_words} are the least")
    tests = [RanTest(name, path) for path in one.modules for name in (path, *one.failing)]
    _must_be_silent(text, task, gold, tests)
    return text, removed


def report_of_bugs(text: str, task: Task, gold: Gold, tests: Collection[RanTest]) -> str:
    """The problem that an author made of the task's, a template's. `tests` are those in the hidden files. Raises Unusable."""
    text = _unwrapped(text)
    if any(line in text for line in added_lines(gold.patch) | added_lines(reversed_patch(gold.patch))):
        raise Unusable("it says how the code is to be changed")
    _must_be_silent(text, task, gold, tests)
    words = " ".join(text.split())
    if any(line not in words for line in _shown(task.problem)):
        raise Unusable("a line of the code or of the output is missing or changed")
    return text


async def told_by(
    author: Author, one: TaskCandidate, tests: Collection[RanTest], *, template: str
) -> TaskCandidate:
    """The candidate with planted bugs and a problem by the author; the template's, whose source is `template`, where no reply can be used;
    failed if there is no reply. `tests` are those in the hidden files.
    """
    task, gold = one.task, one.gold
    assert task is not None
    assert gold is not None
    one = replace(one, outcome="open", reason="", detail="")
    use = functools.partial(report_of_bugs, task=task, gold=gold, tests=tests)
    try:
        told = await author.write(request_of_bugs(task.problem), use)
    except NoReply as error:
        return replace(one, outcome="failed", reason=NO_REPLY, detail=str(error)[-300:])
    except Unusable as error:
        source = f"{template}, because {author.name} wrote nothing that can be used"
        return replace(one, problem_source=source, problem_removed=(f"of the author: {error}",))
    saw = (*one.author_saw, told.prompt)
    task = replace(task, problem=told.value)
    return replace(one, task=task, problem_source=f"{author.name}: failing calls", author_saw=saw)


def _must_be_silent(text: str, task: Task, gold: Gold, tests: Collection[RanTest]) -> None:
    """Raises Unusable for a text that verification would refuse, or that names a hidden test or its file."""
    if answers_in_problem(replace(task, problem=text), gold):
        raise Unusable("it repeats lines of a change or of tests")
    if names_tests(text, tests):
        raise Unusable("it names a test or a file of tests")


def _unwrapped(text: str) -> str:
    """The text without a block of Markdown around all of it."""
    found = _WHOLE.match(text.strip())
    return (found[1] if found else text).strip()


def _without(text: str, lines: Collection[str]) -> str:
    """The text without its lines that have one of these."""
    return "\n".join(one for one in text.split("\n") if not any(line in one for line in lines))


def _shown(template: str) -> Iterator[str]:
    """The lines in the blocks of a template's text, with single blanks."""
    for found in FENCED.finditer(template):
        for line in found[0].split("\n")[1:-1]:
            if line.strip():
                yield " ".join(line.split())
