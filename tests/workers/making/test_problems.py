"""What the problem of a task is made of, and what is taken out of it."""

from pathlib import Path

import pytest

from workers.making.fixes import Fix
from workers.making.history import Commit, Fallen
from workers.making.problems import (
    Discussions,
    Issue,
    Problem,
    Pull,
    cleaned,
    joined,
    names_in_text,
    problem_of,
    read_discussions,
)

PATCH = """diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return _carried(a) + b
"""


def commit(message: str, sha: str = "a" * 40, parent: str = "b" * 40) -> Commit:
    return Commit(sha, (parent,), "Ann", "ann@example.invalid", "2024-01-01T12:00:00+00:00", "", message)


NONE = Discussions()


def problem(message: str, discussions: Discussions = NONE, *, least_words: int = 1) -> Problem:
    one = commit(message)
    fix = Fix("b" * 40, one, (one,))
    return problem_of(fix, discussions, PATCH, lambda name: name == "_carried", least_words=least_words)


def test_a_message_loses_hashes_links_references_and_trailers() -> None:
    found = problem(
        "Sums are differences (#12)\n\nSince 1a2b3c4d5e, adding [two numbers](https://x.invalid/y) subtracts.\n"
        "See https://x.invalid/z\nFixes #11\n\nSigned-off-by: Ann <ann@example.invalid>\nCo-authored-by: B <b@c>\n"
    )
    assert found.text == "Sums are differences\n\nSince an earlier commit, adding two numbers subtracts."
    assert found.source == "commit message"
    assert found.removed == (
        "trailer: Signed-off-by: Ann <ann@example.invalid>",
        "trailer: Co-authored-by: B <b@c>",
        "reference: (#12)",
        "reference: Fixes #11",
        "link: See https://x.invalid/z",
        "hash: 1a2b3c4d5e",
    )


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("Fix #292, fix #205 and closes #103: expired pairs come back.", "expired pairs come back."),
        ("Fixes #7 - sums are wrong", "sums are wrong"),
        ("Sums are wrong (fixes #7, a/b#8; see #9)", "Sums are wrong"),
        ("Sums are wrong (#7) since Monday, see #8 and #9.", "Sums are wrong since Monday,"),
        ("Sums are wrong.\n\nThis fixes #7.", "Sums are wrong."),
        ("Sums are wrong. This PR closes #7, #8", "Sums are wrong."),
        ("Done to resolve #7, but it broke sums.", "Done to resolve #7, but it broke sums."),
        ("- sums are wrong\n: and so are products", "- sums are wrong\n: and so are products"),
    ],
)
def test_what_joined_references_goes_with_them(message: str, text: str) -> None:
    assert problem(message).text == text


@pytest.mark.parametrize("rule", ["--", "---------", "___", "***"])
def test_a_rule_before_trailers_goes_with_them(rule: str) -> None:
    message = f"Sums are **wrong**\n\n{rule}\n\nSigned-off-by: Ann <ann@example.invalid>\n"
    assert problem(message).text == "Sums are **wrong**"
    assert problem("Sums are **wrong**").text == "Sums are **wrong**"


def test_code_that_repeats_the_fix_goes_and_other_code_stays() -> None:
    found = problem(
        "Adding subtracts\n\n```python\nadd(2, 2)  # 0\n```\nMake it:\n```python\nreturn _carried(a) + b\n```\n"
        "Or inline:\n\n    return _carried(a) + b\n"
    )
    assert found.text == "Adding subtracts\n\n```python\nadd(2, 2)  # 0\n```\nMake it:\n\nOr inline:"
    assert all(one.startswith("code: ") for one in found.removed)


SHORT = PATCH.replace("_carried(a) + b", "a + b")


@pytest.mark.parametrize(
    "told",
    [
        "-    return a - b\n+    return a + b",
        "> return a + b",
        "- return a + b",
        "```\n>>> return a+b\n```",
        "It should be `return a + b`, not minus.",
        "It should be ``return a+b``!",
    ],
)
def test_a_line_of_the_fix_goes_whatever_is_around_it(told: str) -> None:
    text, removed = cleaned(f"Adding subtracts.\n\n{told}\n", SHORT, lambda name: False)
    assert "a + b" not in text
    assert "a+b" not in text
    assert text.startswith("Adding subtracts.")
    assert [one[:6] for one in removed] == ["code: "]


def test_an_entry_of_a_list_of_changes_does_not_take_the_message_away() -> None:
    patch = PATCH.replace("+    return _carried(a) + b", "+- Sums are no differences")
    assert cleaned("Sums are no differences", patch, lambda name: False) == ("Sums are no differences", ())


def test_a_plain_constant_that_a_call_should_return_stays() -> None:
    text = "It should `return None`."
    patch = PATCH.replace("_carried(a) + b", "None")
    assert cleaned(text, patch, lambda name: False) == (text, ())


QUOTED = PATCH.replace("_carried(a) + b", "(a - b) * 2 + 1.5")


@pytest.mark.parametrize(
    ("told", "left"),
    [
        ("    return (a - b) * 2 + 1.5  # no sum\n\nThat is it.", "That is it."),
        ("1. return (a - b) * 2 + 1.5\n2. test it", "2. test it"),
        ("<pre>return (a - b) * 2 + 1.5</pre>", ""),
        ("It should be return (a-b)*2 + 1.5 instead. That is it.", "That is it."),
        ("It should be \"return (a - b) * 2\n + 1.5\", I think. That is it.", "That is it."),
        ("```python\ndef add(a, b):\n    return (a - b) * 2 + 1.5  # so\n```\nThat is it.", "That is it."),
        ("  > ```python\n  > x\n  > return (a - b) * 2 + 1.5 # so\n  > ```\nThat is it.", "That is it."),
        ("````\n```\nx\n```\nreturn (a - b) * 2 + 1.5\n````\nThat is it.", "That is it."),
    ],
)
def test_a_line_of_code_of_the_fix_goes_with_its_sentence_or_block_wherever_it_is(told: str, left: str) -> None:
    text, removed = cleaned(f"Adding subtracts.\n\n{told}", QUOTED, lambda name: False)
    assert text == f"Adding subtracts.\n\n{left}".strip()
    assert {one[:6] for one in removed} == {"code: "}


def test_a_sentence_that_the_fix_adds_to_the_documentation_stays() -> None:
    patch = QUOTED.replace("calc.py", "NEWS.md").replace("return (a - b) * 2 + 1.5", "Adding(a, b) adds at last")
    text = "See that Adding(a, b) adds at last, please."
    assert cleaned(text, patch, lambda name: False) == (text, ())


@pytest.mark.parametrize(
    "text",
    [
        'Repro:\n\n```python\nURL("http://a.invalid/b c").path\nmd5(b"a") == "0cc175b9c0f1b6a831c399e269772661"\n```',
        "Headers:\n\n```\nContent-Type: text/html\n```\nare lost.",
        "It calls `get(\"https://a.invalid/b\")` and `handlers[name](event)`, and fails.",
        "Repro:\n\n    >>> md5(b'a').hexdigest()\n    '0cc175b9c0f1b6a831c399e269772661'\n\nis wrong.",
        "The id 550e8400-e29b-41d4-a716-446655440000 is refused, and so is #1a2b3c4d.",
        "See #7 for what is wrong.",
        "It becomes `https://a.invalid`, not `#12`.",
        "Content-Length: is lost (a header).\n\nIt is empty.",
    ],
)
def test_what_code_works_on_and_whole_sentences_stay(text: str) -> None:
    assert cleaned(text, PATCH, lambda name: False) == (text, ())


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("Fixes https://x.invalid/issues/12\n\nSums are wrong.", "Sums are wrong."),
        ("As https://x.invalid/y says, sums are wrong.", "As a page says, sums are wrong."),
        ("Sums are wrong (https://x.invalid/y).", "Sums are wrong."),
        ("Sums are wrong.\nAddresses https://x.invalid/y. ", "Sums are wrong."),
        ("The [docs\nsay](https://x.invalid/y) so.", "The docs\nsay so."),
        ("Sums by [`add`](https://x.invalid/y) are wrong.", "Sums by `add` are wrong."),
        ("This reverts commit 1a2b3c4d5e6f.", "This reverts an earlier commit."),
        ("Since `1a2b3c4d5e6f` sums are wrong.", "Since an earlier commit sums are wrong."),
    ],
)
def test_a_sentence_is_whole_without_its_link_or_hash(message: str, text: str) -> None:
    assert problem(message).text == text


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("Sums fail, e.g. when _carried is on. They fail.", "They fail."),
        ("- adds _carried for sums,\n  products and the rest\n- is slow", "- is slow"),
        (
            "Sums are wrong because there is no such helper as _carried for the\nPython of the\n`API`. They fail.",
            "They fail.",
        ),
        ("```python\nx = 1. + _carried(1)\nprint(x)\n```\nThey fail.", "They fail."),
        ("Repro:\n\n    x = 1\n    y = _carried(x)\n    print(y)\n\nThey fail.", "Repro:\n\nThey fail."),
    ],
)
def test_a_sentence_or_block_with_such_a_name_goes_whole(message: str, text: str) -> None:
    assert problem(message).text == text


@pytest.mark.parametrize("text", [" ", "[", "![", "`", "`a", "a.\u00a0", "\n", "(", "x closes #7, "])
def test_a_text_that_repeats_itself_is_soon_read(text: str) -> None:
    cleaned(text * 200_000 + "x", PATCH, lambda name: False)


def test_no_words_are_lost_before_blanks_that_do_not_break() -> None:
    text = "It fails.\u00a0Then all is lost!\u2003Good."
    assert cleaned(text, PATCH, lambda name: False) == (text, ())


@pytest.mark.parametrize(
    "block",
    [
        "```diff\n-old\n+new\n```\n",
        "~~~ Diff\n-old\n+new\n~~~\n",
        "```{.patch}\n-old\n+new\n```\n",
        "```suggestion\nnew\n```\n",
        "@@ -1,2 +1,2 @@\n def add\n-old\n+new\n",
        "@@ -1,4 +1,4 @@\n def add\n\n-old\n+new\n\n last\n",
        "diff --git a/x b/y\nsimilarity index 90%\nrename from x\nrename to y\n--- x\n+++ y\n@@ -1 +1 @@\n-old\n+new\n",
        "Index: x\n=======\n--- x (old)\n+++ x (new)\n@@ -1 +1 @@\n-old\n+new\n",
        "diff --cc x\nindex 1a,2b..3c\n--- a/x\n+++ b/x\n@@@ -1,2 -1,2 +1,2 @@@\n--old\n++new\n",
    ],
)
def test_differences_go(block: str) -> None:
    assert (
        problem(f"Adding subtracts\n\n{block}\nThat is wrong.").text == "Adding subtracts\n\nThat is wrong."
    )


def test_a_line_that_opens_a_block_is_quoted_without_its_colon_too() -> None:
    patch = PATCH.replace("    return _carried(a) + b", "    if a is None and b:")
    told = "Sums fail. Add an `if a is None and b` guard before the last return. They fail always."
    text, removed = cleaned(told, patch, lambda name: False)
    assert text == "Sums fail. They fail always."
    assert removed == ("code: Add an `if a is None and b` guard before the last return.",)


def test_a_sentence_that_goes_on_in_the_next_line_goes_whole() -> None:
    found = problem(
        "Sums are wrong.\n\nAdds _carried for the single words,\nthe plurals\nand the rest. It is slow\nBut right\n"
    )
    assert found.text == "Sums are wrong.\n\nIt is slow\nBut right"
    assert found.removed == ("names what the fix brings: Adds _carried for the single words,\nthe plurals\nand the rest.",)


def test_sentences_that_name_what_the_fix_brings_go() -> None:
    found = problem(
        "Adding subtracts. The new _carried mends it. Numbers such as 1.5 are wrong, too.\nCall `_carried`!"
    )
    assert found.text == "Adding subtracts. Numbers such as 1.5 are wrong, too."
    assert found.removed == (
        "names what the fix brings: The new _carried mends it.",
        "names what the fix brings: Call `_carried`!",
    )


def test_the_linked_issue_counts_before_the_pull_request_and_this_before_the_message() -> None:
    pull = Pull(number=7, title="Add properly", body="Closes #3", merge_commit_sha="a" * 40)
    issue = Issue(issue=3, title="Sums are wrong", body="2 and 2 make 0.")
    found = problem("Mend", Discussions({7: pull}, {3: issue}))
    assert (found.source, found.text) == ("issue 3", "# Sums are wrong\n\n2 and 2 make 0.")
    found = problem("Mend", Discussions({7: pull}))
    assert (found.source, found.text) == ("pull request 7", "# Add properly")
    by_subject = Pull(number=8, title="Add", body="", merge_commit_sha="c" * 40, issues=(3,))
    assert problem("Mend (#8)", Discussions({8: by_subject}, {3: issue})).source == "issue 3"
    assert problem("Merge pull request #9 from x/y\n\nSums are wrong").text == "Sums are wrong"


@pytest.mark.parametrize(
    ("message", "source"),
    [
        ("Fixes other/project#3", "commit message"),
        ("Fixes fork/Prices#3", "issue 3"),
        ("Fixes #3", "issue 3"),
        ("Fixes #3b", "commit message"),
    ],
)
def test_an_issue_of_another_repository_is_not_that_of_the_number_here(message: str, source: str) -> None:
    issue = Issue(issue=3, title="Sums are wrong", body="")
    assert problem(f"Mend sums.\n\n{message}", Discussions({}, {3: issue}, "prices")).source == source


def test_a_problem_of_few_words_falls() -> None:
    with pytest.raises(Fallen, match="problem too short: 2 words of the commit message, --min-words 3"):
        problem("Mend sums", least_words=3)


def test_commits_of_one_pull_request_are_one_fix() -> None:
    line = tuple(commit(name, sha=name * 40, parent=parent * 40) for name, parent in ("dc", "cb", "ba"))
    pull = Pull(number=1, title="Both", commits=("d" * 40, "c" * 40))
    fixes = list(joined(line, Discussions({1: pull})))
    assert [(one.base[0], [each.message for each in one.commits]) for one in fixes] == [
        ("b", ["d", "c"]),
        ("a", ["b"]),
    ]
    assert [one.is_part for one in fixes] == [False, False]
    assert [one.is_part for one in joined(line[:1], Discussions({1: pull}))] == [True]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", ":1: "),
        ('{"number": "x", "title": ""}', r":1: Expected `int`, got `str` - at `\$.number`"),
        ('{"number": 1, "title": "x"}', ":1: merge_commit_sha: give it, or commits"),
        ('{"issue": 1}', ":1: Object missing required field `title`"),
    ],
)
def test_an_export_that_cannot_be_read_is_refused_by_line_and_field(
    tmp_path: Path, line: str, why: str
) -> None:
    path = tmp_path / "pulls.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=why):
        read_discussions(path)


def test_words_of_a_language_are_no_names() -> None:
    assert list(names_in_text("The sum is rounded; call `half_up` or x.floor(1), not toCents.")) == [
        "half_up",
        "floor",
        "toCents",
    ]
    assert list(names_in_text("Don't call 'half' or \"whole\" with @cache.")) == ["half", "whole", "cache"]
