"""Contradictions in files without Python code: doctest files such as `doc.rst`, and data files with expected values, such as golden files.

One letter or digit is replaced by another. In a doctest file, it is part of the output of an example; the input is not changed.
"""

import ast
import doctest
import random
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from workers.grading.controls.literals import ALPHABETS
from workers.grading.controls.spans import Candidate, Edit
from workers.grading.controls.values import Observed

_MOST = 500
_MOST_PLACES = 3  # limit for one example
_OTHER_TRUTH = {"True": "False", "False": "True"}
_TRACEBACK = "Traceback (most recent call last):"


def doctest_candidates(source: bytes, name: str, chance: random.Random) -> list[Candidate]:
    """Contradictions of the examples in a text file, all of which belong to the one test `name`."""
    try:
        text = source.decode()
        examples = doctest.DocTestParser().get_examples(text)
    except ValueError:
        return []
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    found = [
        Candidate((name,), (Edit(len(text[:start].encode()), len(text[:end].encode()), becomes),), "value")
        for example in examples
        if not example.options.get(doctest.SKIP)
        for start, end, becomes in _changes(text, starts, example, chance)
    ]
    return chance.sample(found, min(len(found), _MOST))


def in_other_examples(text: bytes, failed_lines: list[int], offsets: list[int]) -> list[bool]:
    """Whether each offset of a text file is in an example other than those that failed, which begin at `failed_lines`.

    The expectations of the others may hold without a fix, because a run ends at the first failure. False for all if no failure is known.
    """
    try:
        examples = doctest.DocTestParser().get_examples(text.decode())
    except ValueError:
        examples = []
    firsts = [example.lineno + 1 for example in examples]
    if not {*firsts}.intersection(failed_lines):
        return [False] * len(offsets)
    lines = [text.count(b"\n", 0, offset) + 1 for offset in offsets]
    return [
        max((first for first in firsts if first <= line), default=0) not in failed_lines for line in lines
    ]


def _changes(
    text: str, starts: list[int], example: doctest.Example, chance: random.Random
) -> Iterator[tuple[int, int, str]]:
    """Spans in the expected output of an example, and the replacement for each: another letter or digit, or the opposite truth value."""
    num_lines = example.want.count("\n")
    first = example.lineno + example.source.count("\n")
    last = min(first + num_lines, len(starts) - 1)
    if example.want.startswith(_TRACEBACK):  # only the last line of a traceback is compared
        first = last - 1
    shown = text[starts[first] : starts[last]] if num_lines else ""
    if "..." in shown or "<BLANKLINE>" in shown:
        return
    if (truth := shown.strip()) in _OTHER_TRUTH:
        start = starts[first] + shown.index(truth)
        yield start, start + len(truth), _OTHER_TRUTH[truth]
        return
    places = [starts[first] + place for place, one in enumerate(shown) if one in ALPHABETS]
    if example.want.startswith(_TRACEBACK):
        places = [place for place in places if ":" in text[starts[first] : place]]
    for place in chance.sample(places, min(len(places), _MOST_PLACES)):
        others = ALPHABETS[text[place]].replace(text[place], "")
        before = text[starts[first] : place].strip()
        if text[place].isdigit() and not (before and before[-1].isdigit()):
            others = others.replace("0", "")  # no number begins with a zero
        other = chance.choice(others)
        if not _is_same(shown, place - starts[first], other):
            yield place, place + 1, other


def _is_same(shown: str, place: int, other: str) -> bool:
    """Whether the output is the same value in another spelling."""
    try:
        return ast.literal_eval(shown.strip()) == ast.literal_eval(
            f"{shown[:place]}{other}{shown[place + 1 :]}".strip()
        )
    except (ValueError, SyntaxError, TypeError, MemoryError):
        return False


MAX_FILE_BYTES = 1_000_000
PLACES = (1 / 2, 1 / 4, 3 / 4, 0.0, 1.0)  # positions in the text, as shares of its length
# Numbers and longer words outside escapes, except for words that have a meaning in common formats.
_NUMBER = re.compile(rb"(?<![\\\w.])\d+(?:\.\d+)?(?![\w.])")
_WORD = re.compile(
    rb"(?<![\\\w])(?!(?:true|false|null|none|nan|inf|yes|off)\b)[a-z]{3,}(?!\w)", re.IGNORECASE
)
_SAID = re.compile(rb"\d+(?:\.\d+)?|[A-Za-z]+")
_OTHER = bytes.maketrans(
    b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",
    b"1234567898bcdefghijklmnopqrstuvwxyzyBCDEFGHIJKLMNOPQRSTUVWXYZY",
)

Span = tuple[int, int]


def data_files(
    observed: Mapping[str, Mapping[Span, Observed]], expected: Mapping[str, Collection[Span]]
) -> list[str]:
    """Files that were opened only for expected values: for the expressions at the spans of `expected`, by test file.

    An expression that is part of such an expression, or contains one, opens them for the same purpose.
    """
    reasons: dict[str, set[tuple[str, Span]]] = defaultdict(set)
    for path, spans in expected.items():
        for span in spans:
            for name in observed[path][span].files if span in observed.get(path, {}) else ():
                reasons[name].add((path, span))
    strangers = {
        name
        for path, ones in observed.items()
        for span, one in ones.items()
        for name in one.files
        if not any(path == other and _overlap(span, reason) for other, reason in reasons[name])
    }
    return sorted(name for name, spans in reasons.items() if spans and name not in strangers)


def _overlap(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def data_edits(text: bytes, tests: bytes = b"") -> list[Edit]:
    """Edits of one letter or digit each, the one in the middle of the text first; none if it is not text, or too large.

    A word or number that also occurs in `tests`, the text of test files, is not changed if there are others: tests may pass it to the code,
    and it then identifies a line instead of being expected.
    """
    if len(text) >= MAX_FILE_BYTES or b"\0" in text:
        return []
    try:
        text.decode()
    except UnicodeDecodeError:
        return []
    found = [match for form in (_NUMBER, _WORD) for match in form.finditer(text)]
    said = {*_SAID.findall(tests)}
    own = [match for match in found if match[0] not in said]
    return list(_nearest(text, [match.end() - 1 for match in own or found]))


def _nearest(text: bytes, places: list[int]) -> Iterator[Edit]:
    """An edit of the position that is nearest to each of PLACES."""
    chosen = [min(places, key=lambda place: abs(place - share * len(text))) for share in PLACES if places]
    for place in dict.fromkeys(chosen):
        yield Edit(place, place + 1, text[place : place + 1].translate(_OTHER).decode())
