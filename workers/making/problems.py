"""The problem of a task: what people wrote about a change, without what gives the change away.

The text is that of the linked issue, else of the pull request, else the commit's message. What is taken out of it is recorded: hashes,
links, trailers, differences, code that repeats added lines, and sentences with names that only the fix brings. Hashes, links and the like
in code stay, because they are what the code works on. A name that the hidden tests use stays, because the task could not be solved without
it. A text that a model writes is cleaned in the same way (`reports.py`).
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pipeline import diff
from workers.making.fixes import Fix
from workers.making.history import Commit, Fallen

GIVE_AWAY = ("code: ", "difference: ", "names what the fix brings: ")  # how parts begin that tell of the fix
LEAST_TELLING_CHARS = 8  # length of an added line that a block of code may not repeat
_CLOSES = re.compile(
    r"\b(?:close[sd]?|fix(?:e[sd])?|resolve[sd]?)\b:?\s+(?:[\w.-]+/([\w.-]+))?#(\d+)\b", re.IGNORECASE
)
_PULL_IN_SUBJECT = re.compile(r"\(#(\d+)\)\s*$|^Merge pull request #(\d+)")
_MERGE_SUBJECT = re.compile(r"\AMerge (?:pull request|branch|remote-tracking branch|tag)\b[^\n]*\n*")
FENCED = re.compile(
    r"^[ \t>*+-]*(?P<fence>`{3,}(?=[^`\n]*\n)|~{3,})[^\n]*\n.*?(?:^[ \t>]*(?P=fence)[`~]*[ \t]*$|\Z)",
    re.MULTILINE | re.DOTALL,
)
_DIFF_FENCE = re.compile(
    r"[^`~\n]*(?:`{3,}|~{3,})[ \t]*\{?[ \t]*\.?(?:u?diff|patch|suggestion)\b", re.IGNORECASE
)
_INDENTED = re.compile(r"(?:(?<=\n\n)|\A)(?:(?: {4}|\t)[^\n]*(?:\n|\Z)|[ \t]*\n(?= {4}|\t))+")
# A line that is empty goes on with a hunk, because git removes the blank that begins it from messages.
_HUNK = r"@@+ -\d.*\n?(?:[-+ \\].*\n?|\n(?=[+ \\]|-(?! \S)))*"
_DIFF = re.compile(
    r"^(?:diff --(?:git|cc|combined) .*\n?(?:(?:old|new|deleted|similarity|dissimilarity|rename|copy) .*\n?)*"
    rf"|Index: \S.*\n=+\n|index [0-9a-f]+(?:,[0-9a-f]+)*\.\..*\n?|--- \S.*\n\+\+\+ \S.*\n?|--- [ab]/.*\n?|\+\+\+ [ab]/.*\n?|{_HUNK})",
    re.MULTILINE,
)
_TRAILER = re.compile(
    r"^(?:[A-Z][A-Za-z]+(?:-[A-Za-z]+)*-[Bb]y|Change-Id|Reviewed-on|git-svn-id):[ \t]+\S.*\n?"
    r"|^(?:[A-Z][A-Za-z]+(?:-[A-Za-z]+)+:[ \t]+\S.*(?:\n|\Z)){1,20}\s*\Z|^\(cherry picked from commit .*\n?",
    re.MULTILINE,
)
_NUMBER = r"(?:[\w.-]+/[\w.-]+)?#\d+"
_BY = r"(?:this(?: commit| change| patch| PR)?[ \t]+)?"
_REFERRING = rf"\b{_BY}(?:close[sd]?|fix(?:e[sd])?|resolve[sd]?|refs?|see|part of)\b:?\s+{_NUMBER}"
_MORE = rf"(?:[ \t]*(?:[,;&]|\band\b)+[ \t]*(?:{_REFERRING}|{_NUMBER}))*"
# What goes on with a sentence, which would have no beginning without the reference
_GOES_ON = r"(?![ \t]+(?:as|because|but|by|for|from|if|in|of|on|or|so|that|to|when|where|which|while|with)\b)"
_REFERENCE = re.compile(
    rf"^(?:{_REFERRING}{_MORE}|\({_NUMBER}{_MORE}\)){_GOES_ON}[ \t]*(?:[:,.-][ \t]*)?"
    rf"| ?\((?:{_REFERRING}|{_NUMBER}){_MORE}\)\.?|(?P<inside>{_REFERRING}{_MORE}\.?)",
    re.IGNORECASE | re.MULTILINE,
)
_LINE_END = re.compile(r"[ \t]*$", re.MULTILINE)
_LINKED_TEXT = re.compile(r"!?\[([^\[\]]{0,500})\]\((?=[^)\s]{0,300}[/#:])[^)\s]{1,500}\)")
_ADDRESS = r"<?\b(?:https?|ftp|git|ssh)://(?:[^\s>)\"'`,.;:!?]|[,.;:!?'](?![\s)]|\Z))+>?"
_LINK = re.compile(
    rf"^(?:[ \t]*[-*+][ \t]+)?(?:{_BY}(?:close[sd]?|fix(?:e[sd])?|resolve[sd]?|address(?:es|ed)?|refs?|see|part of)"
    rf"\b:?[ \t]+)?{_ADDRESS}[ \t]*\.?[ \t]*$"
    rf"| ?\({_ADDRESS}\)|(?P<inside>{_ADDRESS})",
    re.IGNORECASE | re.MULTILINE,
)
_HEX = r"(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}"
_HASH = re.compile(rf"(?:\bcommit[ \t]+)?(?:`{_HEX}`|(?<![-#\w]){_HEX}(?![-\w]))")
_SENTENCE = re.compile(
    r"(?:[ \t]*\d{1,3}\.(?=[ \t]))?[^.!?\n]*(?:(?:[.!?](?![ \t\n]|\Z)|(?:(?<=\b[Ee]\.g)|(?<=\b[Ii]\.e)|(?<=\b[Cc]f)|(?<=\bvs))\.)"
    r"[^.!?\n]*)*[.!?]?(?:[ \t]+|\n|\Z)"
)
_WRAPPED = re.compile(r"[^.!?:\s][ \t]*\n\Z")  # a line that ends without a mark
_WRAPPED_CHARS = 60  # a line that would be longer with the next word is wrapped
_ITEM = re.compile(r"[ \t]*(?:[-*+>|#\u2022]|\d+[.)][ \t])")  # how lines begin that go on with no other
_MARKS = " \t+->*$`"  # of a difference, a quotation, a list, a prompt or code at the ends of a line
_NUMBERED = re.compile(r"\A[ \t>]*\d+[.)][ \t]")
_PLAIN_RESULT = re.compile(r"return(?:True|False|None|nil|true|false);?")  # which a text may ask for
_SPAN = re.compile(r"(?<!`)(`+)(?!`)([^`\n]+)\1")
_RULE = re.compile(r"\n\n[-_*]{2,}\Z")  # before trailers that are gone
_OPERATES = re.compile(r"[=\[\]{}<>|&^~@+*/%]|\w\(")  # what makes a line code, wherever it is quoted
# Files that hold no code
_PROSE = re.compile(rb"\.(?:md|rst|txt|adoc|html?)\Z|/[^/.]+\Z|\A[^/.]+\Z", re.IGNORECASE)
_CODED = re.compile(r"_|\d|[a-z][A-Z]")  # how a name looks that is no word of a language


class Pull(msgspec.Struct, frozen=True, kw_only=True):
    """A line of --pulls about a pull request, which has `merge_commit_sha` or `commits`."""

    number: int
    title: str
    body: str | None = None
    merge_commit_sha: str | None = None
    commits: tuple[str, ...] = ()
    issues: tuple[int, ...] = ()


class Issue(msgspec.Struct, frozen=True, kw_only=True):
    """A line of --pulls about an issue."""

    issue: int
    title: str
    body: str | None = None


@dataclass(frozen=True, slots=True)
class Discussions:
    """The pull requests and issues of an export. `name` is the repository's, "" if references to any are taken for its own."""

    pulls: Mapping[int, Pull] = field(default_factory=dict[int, Pull])
    issues: Mapping[int, Issue] = field(default_factory=dict[int, Issue])
    name: str = ""

    def pull_of(self, fix: Fix) -> Pull | None:
        shas = {one.sha for one in fix.commits}
        for pull in self.pulls.values():
            if pull.merge_commit_sha in shas or shas & set(pull.commits):
                return pull
        named = _PULL_IN_SUBJECT.search(fix.head.message.split("\n")[0])
        return self.pulls.get(int(named[1] or named[2])) if named else None


def read_discussions(path: Path, name: str = "") -> Discussions:
    """The pull requests and issues of an export of the repository `name`, one a line as JSON. Raises ValueError naming line and field."""
    pulls: dict[int, Pull] = {}
    issues: dict[int, Issue] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row: Any = msgspec.json.decode(line)
            if isinstance(row, dict) and "issue" in row:
                issue = msgspec.convert(row, Issue)
                issues[issue.issue] = issue
                continue
            pull = msgspec.convert(row, Pull)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"--pulls: {path}:{number}: {error}") from error
        if not pull.merge_commit_sha and not pull.commits:
            raise ValueError(f"--pulls: {path}:{number}: merge_commit_sha: give it, or commits")
        pulls[pull.number] = pull
    return Discussions(pulls, issues, name)


@dataclass(frozen=True, slots=True)
class Problem:
    """The text, where it is from, and what was taken out of it."""

    text: str
    source: str
    removed: tuple[str, ...]


def problem_of(
    fix: Fix, discussions: Discussions, patch: str, is_given_away: Callable[[str], bool], *, least_words: int
) -> Problem:
    """The problem. `is_given_away` says whether a name is one that only the fix brings. Raises Fallen if too few words are left."""
    source, text = _source(fix, discussions)
    text, removed = cleaned(text, patch, is_given_away)
    if (num_words := words_in(text)) < least_words:
        raise Fallen("problem too short", f"{num_words} words of the {source}, --min-words {least_words}")
    return Problem(text, source, removed)


def words_in(text: str) -> int:
    """The number of words."""
    return len(re.findall(r"\w+", text))


def cleaned(text: str, patch: str, is_given_away: Callable[[str], bool]) -> tuple[str, tuple[str, ...]]:
    """The text without what gives the patch away or leads elsewhere, and what was taken out, each with its kind before a colon."""
    removed: list[str] = []
    added = frozenset(map(_squeezed, added_lines(patch)))
    text = _without_code(text.replace("\r\n", "\n"), added, removed)
    for kind, pattern, instead in (
        ("difference", _DIFF, ""),
        ("trailer", _TRAILER, ""),
        ("reference", _REFERENCE, ""),
        ("link", _LINK, "a page"),
        ("hash", _HASH, "an earlier commit"),
    ):
        if kind == "link":
            text = _replaced(text, ((found, found[1]) for found in _outside_code(_LINKED_TEXT, text)))
        taken = [found for found in _outside_code(pattern, text) if not _is_inside(found)]
        removed += [f"{kind}: {found[0].strip()}" for found in taken]
        text = _replaced(
            text, ((found, instead if found.groupdict().get("inside", instead) else "") for found in taken)
        )
    text = "".join(_kept_sentences(text, added, _quoted(text, patch), is_given_away, removed))
    text = re.sub(r"(?<![ \t])[ \t]+(?=\n|\Z)", "", re.sub(r"\n{3,}", "\n\n", text)).strip()
    return _RULE.sub("", text), tuple(removed)


def _outside_code(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """Where the text has the pattern outside of code, which is in blocks and between backquotes, but for a hash that is alone there."""
    code = sorted(
        [found.span() for block in (FENCED, _INDENTED) for found in block.finditer(text)]
        + [
            found.span()
            for found in _SPAN.finditer(text)
            if pattern is not _HASH or not _HASH.fullmatch(found[2])
        ]
    )
    starts = [start for start, _ in code]
    ends: list[int] = []
    for _, end in code:
        ends.append(max(end, ends[-1] if ends else 0))
    for found in pattern.finditer(text):
        before = bisect_right(starts, found.start())
        if pattern is _DIFF or not before or ends[before - 1] < found.end():
            yield found


def _is_inside(found: re.Match[str]) -> bool:
    """Whether it is a reference in the middle of a sentence, which would not be whole without it."""
    is_inside = found.re is _REFERENCE and found["inside"] is not None
    return is_inside and _LINE_END.match(found.string, found.end()) is None


def _replaced(text: str, parts: Iterable[tuple[re.Match[str], str]]) -> str:
    """The text with something else instead of these parts of it."""
    kept, at = list[str](), 0
    for found, instead in parts:
        kept += [text[at : found.start()], instead]
        at = found.end()
    return "".join([*kept, text[at:]])


def _source(fix: Fix, discussions: Discussions) -> tuple[str, str]:
    """The name of the source, and its title and text."""
    messages = "\n\n".join(one.message.strip() for one in reversed(fix.commits))
    pull = discussions.pull_of(fix)
    linked = [*(pull.issues if pull else ())]
    linked += [
        int(number)
        for name, number in _CLOSES.findall(f"{(pull and pull.body) or ''}\n{messages}")
        if not name or discussions.name.lower() in ("", name.lower())
    ]
    for number in linked:
        if issue := discussions.issues.get(number):
            return f"issue {number}", f"# {issue.title}\n\n{issue.body or ''}"
    if pull:
        return f"pull request {pull.number}", f"# {pull.title}\n\n{pull.body or ''}"
    return "commit message", _MERGE_SUBJECT.sub("", messages)


def added_lines(patch: str) -> frozenset[str]:
    """The lines that the patch adds and does not remove elsewhere, without blanks around them, as far as they are long enough to tell."""
    lines: dict[bytes, set[str]] = {b"+": set(), b"-": set(), b" ": set()}
    for section in diff.sections(patch.encode()):
        for hunk in section.hunks:
            for sign, line in hunk.lines:
                lines[sign].add(line.decode("utf-8", "replace").strip())
    return frozenset(
        line for line in lines[b"+"] - lines[b"-"] - lines[b" "] if len(line) >= LEAST_TELLING_CHARS
    )


def _without_code(text: str, added: frozenset[str], removed: list[str]) -> str:
    """The text without blocks of code, fenced or indented, that repeat an added line or are differences. `added` has lines without blanks
    in them.
    """

    def is_told(line: str) -> bool:
        bare = _NUMBERED.sub("", line).strip(_MARKS)
        return not added.isdisjoint(_squeezed(one) for one in (line, line.strip(_MARKS), bare))

    def kept(found: re.Match[str]) -> str:
        block = found[0]
        is_diff = _DIFF_FENCE.match(block) or re.search(r"^[ \t>]*@@ -\d", block, re.MULTILINE)
        if is_diff or any(map(is_told, block.split("\n"))):
            removed.append(f"code: {block.strip()}")
            return ""
        return block

    text = FENCED.sub(kept, text)
    lines = text.split("\n")
    removed += [f"code: {line.strip()}" for line in lines if is_told(line)]
    return "\n".join(line for line in lines if not is_told(line))


def _squeezed(line: str) -> str:
    """The line without blanks, which people and formatters write as they like, and without what opens a block or ends a statement at its
    end, which people leave out when they quote a line.
    """
    return "".join(line.split()).rstrip(":;{,")


def _quotes_code(sentence: str, added: frozenset[str]) -> bool:
    """Whether a sentence has an added line between backquotes, but for one that only returns a plain constant."""
    spans = (_squeezed(found[2]) for found in _SPAN.finditer(sentence))
    return any(span in added and not _PLAIN_RESULT.fullmatch(span) for span in spans)


def _quoted(text: str, patch: str) -> list[tuple[int, int]]:
    """Where the text quotes an added line of code, whatever is around it and however it is spaced, as begin and end."""
    lines: set[str] = set()
    for section in diff.sections(patch.encode()):
        if not _PROSE.search(section.new or section.old or b""):
            lines |= {
                line.decode("utf-8", "replace")
                for hunk in section.hunks
                for sign, line in hunk.lines
                if sign == b"+"
            }
    told, squeezed = added_lines(patch), "".join(text.split())
    quotable = {_squeezed(line) for line in lines if line.strip() in told and _OPERATES.search(line)}
    found: list[tuple[int, int]] = []
    for line in quotable:
        if len(line) >= LEAST_TELLING_CHARS and line in squeezed:
            begin, end = (r"(?<!\w)" if line[0].isalnum() else ""), (r"(?!\w)" if line[-1].isalnum() else "")
            pattern = begin + r"\s*".join(map(re.escape, line)) + end
            found += [one.span() for one in re.finditer(pattern, text)]
    return found


def _kept_sentences(
    text: str,
    added: frozenset[str],
    quoted: Sequence[tuple[int, int]],
    is_given_away: Callable[[str], bool],
    removed: list[str],
) -> Iterator[str]:
    """The sentences and blocks of code of the text without those that quote an added line, or name what only the fix brings."""
    at = 0
    for part in _parts(text):
        start, at = at, at + len(part)
        if _quotes_code(part, added) or any(first < at and start < last for first, last in quoted):
            why = "code"
        elif any(is_given_away(name) for name in names_in_text(part)):
            why = "names what the fix brings"
        else:
            yield part
            continue
        removed.append(f"{why}: {part.strip()}")
        yield "\n" if part.endswith("\n") else ""


def _parts(text: str) -> Iterator[str]:
    """The sentences and the blocks of code of the text, one after another."""
    at = 0
    blocks = sorted(found.span() for block in (FENCED, _INDENTED) for found in block.finditer(text))
    for start, end in blocks:
        if start >= at:
            yield from _sentences(text[at:start])
            yield text[start:end]
            at = end
    yield from _sentences(text[at:])


def _sentences(text: str) -> Iterator[str]:
    """The sentences of the text, one after another. A line goes on with the sentence of the line before, unless a mark ended that, if it
    begins in small letters, with a quotation or a bracket, or would have made that line long.
    """
    parts: list[str] = []
    for found in _SENTENCE.finditer(text):
        part = found[0]
        if parts and not (_WRAPPED.search(parts[-1]) and _goes_on(text, found.start())):
            yield "".join(parts)
            parts.clear()
        parts.append(part)
    yield "".join(parts)


def _goes_on(text: str, at: int) -> bool:
    """Whether the line that begins at `at` goes on with the line before, which no mark ends."""
    words = text[at : at + 2 * _WRAPPED_CHARS].split(None, 1)
    if not words or text[at : at + 1] == "\n" or _ITEM.match(text, at):
        return False
    line = text[text.rfind("\n", 0, at - 1) + 1 : at].strip()
    return words[0][0].islower() or words[0][0] in "`(\"'" or len(line) + 1 + len(words[0]) > _WRAPPED_CHARS


def names_in_text(text: str) -> Iterator[str]:
    """Words that are names of code: by their letters, or by quotes, a call, a dot or an at sign at them."""
    quoted = " ".join(re.findall(r"`([^`\n]+)`", text))
    for found in re.finditer(r"([.@]?)\b([A-Za-z_]\w*)\b(\(?)", text):
        mark, word, call = found.groups()
        around = text[found.start() - 1 : found.start()] + text[found.end() : found.end() + 1]
        is_quoted = around in ('""', "''") or re.search(rf"\b{word}\b", quoted)
        if mark or call or _CODED.search(word) or is_quoted:
            yield word


def joined(commits: tuple[Commit, ...], discussions: Discussions) -> Iterator[Fix]:
    """The fixes of a line of commits, newest first: the commits of one pull request that follow each other are one fix."""
    pull_of = {sha: pull.number for pull in discussions.pulls.values() for sha in pull.commits}
    at = 0
    while at < len(commits):
        end = at + 1
        number = pull_of.get(commits[at].sha)
        while (
            number is not None
            and end < len(commits)
            and pull_of.get(commits[end].sha) == number
            and commits[end - 1].parents[:1] == (commits[end].sha,)
        ):
            end += 1
        run = commits[at:end]
        base = run[-1].parents[0] if run[-1].parents else ""
        yield Fix(base, run[0], run, is_part=number is not None and pull_of.get(base) == number)
        at = end
