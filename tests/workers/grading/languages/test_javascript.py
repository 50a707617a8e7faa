"""Tests of JavaScript: the tests of a file, outcomes in the logs of its runners, and contradictions of expectations."""

# ruff: noqa: RUF001 (logs of runners contain such characters)

import random

import pytest

from workers.grading.controls.spans import Candidate
from workers.grading.languages.javascript import LANGUAGE
from workers.grading.languages.language import DeclaredTest

NODE_TAP = r"""TAP version 13
# printed by a test: not ok 9 - invented
# Subtest: adds one
ok 1 - adds one
  ---
  duration_ms: 12.260188
  ...
# Subtest: outer
    # Subtest: inner
        # Subtest: deep \# hash
        ok 1 - deep \# hash
          ---
          duration_ms: 0.579563
          ...
        # Subtest: fails
        not ok 2 - fails
          ---
          error: |-
            not ok 1 - deep \# hash
          ...
        # Subtest: skipped
        ok 3 - skipped # SKIP
        1..3
    not ok 1 - inner
    1..1
not ok 2 - outer
1..2
"""
NODE_SPEC = """✔ adds one (4.654373ms)
▶ outer
  ▶ inner
    ✔ has a (1 ms) name (0.566669ms)
    ✖ fails (4.045225ms)
      AssertionError [ERR_ASSERTION]: Expected values to be strictly equal:

    ﹣ skipped (7.29781ms) # SKIP
    ✔ later (0.199463ms) # TODO
  ✖ inner (13.341287ms)
✖ outer (16.508753ms)
ℹ tests 5

✖ failing tests:

test at n/a.test.mjs:3:82
✖ adds one (4.045225ms)
"""
MOCHA = """

  ✔ top
  1) top fails
  outer
printed
    ✔ first
    inner
      2) fails
      - skipped
      ✔ slow (102ms)

  hooked
    3) "before each" hook: prep for "never"


  4 passing (131ms)
  1 pending
  3 failing

  1) top
       first:
      + expected - actual
"""
JEST = """FAIL j/a.test.js (5.2 s)
  ✓ top
  outer
    ✓ first (36 ms)
    inner
      ✕ fails (3 ms)
      ✓ adds 1 to 2 (2 ms)
      ○ skipped slow
      ✎ todo pending

  ● outer › inner › fails

    expect(received).toBe(expected) // Object.is equality

PASS j/b.test.js
  ✓ top
"""
VITEST = """
 RUN  v3.2.7 /testbed

 ✓ v/a.test.ts > outer > first 4ms (retry x2)
 × v/a.test.ts > outer > inner > fails 26ms
   → expected 1 to be 2 // Object.is equality
 ↓ v/a.test.ts > outer > inner > skipped
 ❯ v/b.test.ts (2 tests | 1 failed) 421ms
   \x1b[32m✓\x1b[39m outer > second 3ms
   × outer > third (retry x1) (repeat x1) 10ms
 ✓ v/c.test.ts (3 tests) 7ms

 FAIL  v/d.test.ts > lost
"""
TAPE = """TAP version 13
# first of tape
ok 1 should be strictly equal
ok 2 is fine
# second
not ok 3 one is two
  ---
    operator: equal
  ...
ok 4 should be deeply equivalent
# SKIP third
1..4
# tests 4
# pass  3
"""
AVA = """
  - [skip] third
  ✔ a › first of ava
  ✘ [fail]: second
"""
JEST_JSON = """> jest --json
{"numFailedTestSuites":1,"testResults":[{"name":"/testbed/j/a.test.js","assertionResults":[
{"ancestorTitles":["outer"],"title":"first","status":"passed"},{"ancestorTitles":[],"title":"top","status":"failed"}]}]}
"""
MOCHA_JSON = """{
  "stats": {"tests": 1},
  "passes": [{"title": "first", "fullTitle": "outer first", "file": "/testbed/a.js"}], "failures": [], "pending": []
}
"""


@pytest.mark.parametrize(
    ("log", "passed", "failed", "skipped"),
    [
        (NODE_TAP, ["adds one", "outer > inner > deep # hash"], ["outer > inner > fails", "outer > inner", "outer"],
         ["outer > inner > skipped"]),
        (NODE_SPEC, ["adds one", "outer > inner > has a (1 ms) name"], ["outer > inner > fails", "outer > inner", "outer"],
         ["outer > inner > skipped", "outer > inner > later"]),
        (MOCHA, ["top", "outer > first", "outer > inner > slow"], ["top fails", "outer > inner > fails", "hooked > never"],
         ["outer > inner > skipped"]),
        (JEST, ["j/a.test.js > top", "j/a.test.js > outer > first", "j/a.test.js > outer > inner > adds 1 to 2", "j/b.test.js > top"],
         ["j/a.test.js > outer > inner > fails"], ["j/a.test.js > outer > inner > slow", "j/a.test.js > outer > inner > pending"]),
        (VITEST, ["v/a.test.ts > outer > first", "v/b.test.ts > outer > second"],
         ["v/a.test.ts > outer > inner > fails", "v/b.test.ts > outer > third", "v/d.test.ts > lost"],
         ["v/a.test.ts > outer > inner > skipped"]),
        (TAPE, ["first of tape"], ["second"], ["third"]),
        (AVA, ["a > first of ava"], ["second"], ["third"]),
        (JEST_JSON, ["/testbed/j/a.test.js > outer > first"], ["/testbed/j/a.test.js > top"], []),
        (MOCHA_JSON, ["/testbed/a.js > outer first"], [], []),
        ("ok 1 - a # time=5ms\n", ["a"], [], []),
        ("{\"stats\": [[[\n" * 30 + "✔ x\n", ["x"], [], []),
    ],
)  # fmt: skip
def test_a_log_says_the_outcome_of_each_test(
    log: str, passed: list[str], failed: list[str], skipped: list[str]
) -> None:
    expected = {"PASSED": passed, "FAILED": failed, "SKIPPED": skipped}
    assert LANGUAGE.outcomes(log) == {name: outcome for outcome, names in expected.items() for name in names}


@pytest.mark.parametrize("log", ["not ok 1 - a\nok 2 - a\n", "ok 1 - a\nnot ok 2 - a\n"])
def test_a_test_that_failed_once_has_failed(log: str) -> None:
    assert LANGUAGE.outcomes(log) == {"a": "FAILED"}


def declared(source: str) -> dict[str, DeclaredTest]:
    return {test.name: test for test in LANGUAGE.tests(source.encode())}


def matched(source: str, name: str) -> list[str]:
    """The tests of `source` that a runner's name may mean, by their keys and otherwise by their patterns."""
    tests = declared(source)
    keys = [form.key for form in LANGUAGE.forms(name)]
    exact = [one for key in keys for one, test in tests.items() if key in test.keys]
    return exact[:1] or [
        one for one, test in tests.items() if test.pattern and any(map(test.pattern.fullmatch, keys))
    ]


NESTED = r"""
import test, { describe } from 'node:test';
const TITLE = 'a constant';
describe('outer', () => {
  describe('inner  part', function () {
    it.only('it\'s \u{41}', async () => {});
    specify('a' + 'b', () => {});
    it(TITLE, done => done());
    it('pending');
  });
  test.concurrent.each([[1, 2]])('adds %i to $b', (a, b) => {});
  it(`of ${kind}`, () => {});
});
test('parent', async t => { await t.test('child', { skip: true }, () => {}); });
/x/.test('no test'); page.test('neither');
Deno.test('deno', () => {});
"""


def test_the_tests_of_a_file_are_named_by_their_titles_from_the_outermost_one() -> None:
    assert list(declared(NESTED)) == [
        *("outer > inner part > it's A", "outer > inner part > ab", "outer > inner part > a constant"),
        *("outer > inner part > pending", "outer > adds %i to $b", "outer > of ${kind}"),
        *("parent", "parent > child", "deno"),
    ]


@pytest.mark.parametrize(
    ("name", "means"),
    [
        ("outer > inner part > it's A", "outer > inner part > it's A"),
        ("test/a.test.js > outer > inner part > it's A", "outer > inner part > it's A"),
        ("outer inner part ab (5 ms)", "outer > inner part > ab"),
        ("src/x.spec.ts | outer inner part ab", "outer > inner part > ab"),
        ("a constant [12ms]", "outer > inner part > a constant"),
        ("outer › adds 1 to 2", "outer > adds %i to $b"),
        ("adds 1 to 2", "outer > adds %i to $b"),
        ("a/b.test.tsx > outer > of any kind", "outer > of ${kind}"),
    ],
)
def test_the_names_of_runners_mean_the_tests_of_the_file(name: str, means: str) -> None:
    assert matched(NESTED, name) == [means]


def test_a_name_with_a_file_says_the_place() -> None:
    assert {form.place for form in LANGUAGE.forms("./test/a.test.js > b > c")} == {"test/a.test.js", ""}
    assert LANGUAGE.forms("/testbed/test/a.test.js > b")[0].place == "a.test.js"
    assert [form.key for form in LANGUAGE.forms("b > c (3 ms)")] == ["b > c (3 ms)", "c (3 ms)", "b > c", "c"]


def test_a_source_that_is_no_text_has_no_tests() -> None:
    assert LANGUAGE.tests(b"test('\xff', () => {})") == []
    assert LANGUAGE.candidates(b"test('\xff', () => {})", random.Random(0)) == []


@pytest.mark.parametrize(
    ("path", "may"),
    [
        ("test/a.js", True), ("src/__tests__/a.tsx", True), ("src/a.spec.mts", True), ("a-test.cjs", True), ("test.js", True),
        ("src/a.js", False), ("src/contest.js", False), ("src/a.test.d.ts", False), ("node_modules/x/test/a.js", False),
        ("test/a.py", False),
    ],
)  # fmt: skip
def test_a_file_may_hold_tests_by_its_path(path: str, may: bool) -> None:
    assert LANGUAGE.may_hold_tests(path) is may


def contradicted(source: str, seed: int = 0) -> list[tuple[Candidate, str, str, str]]:
    """The candidates with what each replaces, what it becomes, and the whole changed source."""
    data = source.encode()
    found: list[tuple[Candidate, str, str, str]] = []
    for one in LANGUAGE.candidates(data, random.Random(seed)):
        (edit,) = one.edits
        changed = (data[: edit.start] + edit.becomes.encode() + data[edit.end :]).decode()
        assert changed.count("\n") == source.count("\n")
        found.append((one, data[edit.start : edit.end].decode(), edit.becomes, changed))
    return found


def replaced(body: str, kind: str = "value", before: str = "") -> list[str]:
    found = contradicted(f"{before}\ntest('a', async (t) => {{ {body} }});")
    assert {name for one, *_ in found for name in one.tests} <= {"a"}
    return sorted(was for one, was, _, _ in found if one.kind == kind)


@pytest.mark.parametrize(
    ("body", "literals"),
    [
        ("assert.equal(add(1, 2), 3);", ["3"]),
        ("assert.strictEqual(3, add(1, 2));", ["3"]),
        ("assert.deepEqual(f('in'), { a: [1, 'x'], b: -2, c: null });", ["'x'", "1", "2", "null"]),
        ("expect(f(1)).toBe(true);", ["true"]),
        ("await expect(f(1)).resolves.toEqual([]);", ["[]"]),
        ("expect(f).toHaveBeenNthCalledWith(1, 'x', 2);", ["'x'", "2"]),
        ("expect(f).toHaveProperty('a.b', 5);", ["5"]),
        ("expect(f(1)).toMatchInlineSnapshot(`\n abc\n`);", ["`\n abc\n`"]),
        ("expect(f).toThrow(new Error('bad'));", ["'bad'"]),
        ("expect(f(1)).to.deep.equal(expect.objectContaining({ a: 1 }));", ["1"]),
        ("expect(f(1)).to.have.property('n').that.equals(4);", ["'n'", "4"]),
        ("expect(f(1)).to.be.true;", ["true"]),
        ("f(1).should.equal('x');", ["'x'"]),
        ("t.is(f(1), 7); t.deepLooseEqual(g(2), [8]); other.is(1, 2);", ["7", "8"]),
        ("await request(app).get('/').expect(200).expect('Content-Type', /json/);", ["/json/", "200"]),
        ("assert(f(1) === 5);", ["5"]),
        ("assert.throws(() => f(1), /bad/, 'message');", ["/bad/"]),
        ("assert.throws(() => f(1), { code: 'E1' });", ["'E1'"]),
        ("const want = { n: 1 }; const given = { n: 2 }; assert.deepEqual(f(given), want);", ["1"]),
        ("const both = 4; assert.equal(f(both), both);", ["both"]),
        ("for (const c of [{ a: 1, want: 2 }]) assert.equal(f(c.a), c.want);", ["2"]),
        ("[[1, 2], [3, 4]].forEach(([a, want]) => { assert.equal(f(a), want); });", ["2", "4"]),
        ("expect(f(1)).not.toBe(3); assert.notEqual(f(1), 4); expect(f(4)).toBeTruthy();", []),
        ("st['equal'](1, 2); const x = g(5); equal(f(x), x);", ["2"]),
    ],
)
def test_a_literal_that_a_test_expects_is_changed_where_it_is_written(body: str, literals: list[str]) -> None:
    assert replaced(body) == sorted(literals)


def test_a_constant_of_the_file_is_changed_for_all_tests_that_expect_it() -> None:
    found = contradicted(
        "const W = { n: 1 };\ntest('a', () => { equal(f(), W) });\ntest('b', () => { assert.equal(g(), W.n) });"
    )
    assert [one.tests for one, was, *_ in found if was == "1"] == [("a", "b")]


TABLES = """
test.each([[1, 2], [3, 4]])('doubles %i', (n, want) => { expect(f(n)).toBe(want); });
test.each([[5, 6]])('shows %i, %i', (n, want) => { expect(f(n)).toBe(want); });
test.each([{ n: 7, want: 8 }])('object $n', ({ n, want }) => { expect(f(n)).toBe(want); });
test.each([{ n: 17, want: 18 }])('object $want', ({ n, want }) => { expect(f(n)).toBe(want); });
test.each`
  n    | want
  ${9} | ${10}
`('template $n', ({ n, want }) => { expect(f(n)).toBe(want); });
"""


def test_a_table_is_changed_in_the_column_that_is_expected_unless_a_title_shows_it() -> None:
    changed = [(*one.tests, was) for one, was, *_ in contradicted(TABLES) if one.kind == "value"]
    assert sorted(changed) == [
        ("doubles %i", "2"),
        ("doubles %i", "4"),
        ("object $n", "8"),
        ("template $n", "10"),
    ]


HELPERS = """
function check(input, want) { assert.equal(up(input), want); }
const deeper = (got) => { assert.ok(got); };
const through = (got) => deeper(got);
describe('s', () => {
  beforeEach(() => { assert.equal(state, 1); });
  it('a', () => { check('x', 'X'); });
  it('b', () => { check('y', 'Y'); through(1); });
});
it('c', () => { through(2); });
"""


def test_what_a_helper_expects_counts_for_each_test_that_reaches_it() -> None:
    tests = {was: one.tests for one, was, *_ in contradicted(HELPERS)}
    assert tests["'X'"] == ("s > a",)
    assert tests["'Y'"] == ("s > b",)
    assert tests["want"] == ("s > a", "s > b")
    assert set(tests["got"]) == {"s > b", "c"}
    assert tests["1"] == ("s > a", "s > b")
    assert "'x'" not in tests


@pytest.mark.parametrize(
    ("body", "becomes"),
    [
        ("expect(f(1)).toBe(x());", "expect(f(1)).not.toBe(x());"),
        ("expect(f(1))\n.not\n.toBe(2);", "expect(f(1))\n\n.toBe(2);"),
        ("await expect(f(1)).rejects.toThrow();", "await expect(f(1)).rejects.not.toThrow();"),
        ("expect(f(1)).to.be.empty;", "expect(f(1)).to.be.not.empty;"),
        ("assert.ok(f(1), 'why');", "assert.ok(!(f(1)), 'why');"),
        ("assert(f(1));", "assert(!(f(1)));"),
        ("assert.notEqual(f(1), 2);", "assert.equal(f(1), 2);"),
        ("assert.throws(() => f(1));", "assert.doesNotThrow(() => f(1));"),
    ],
)
def test_a_condition_is_reversed(body: str, becomes: str) -> None:
    opposites = [
        changed
        for one, *_, changed in contradicted(f"test('a', () => {{ {body} }});")
        if one.kind == "opposite"
    ]
    assert opposites == [f"test('a', () => {{ {becomes} }});"]


def test_an_expected_value_that_is_computed_becomes_one_that_equals_nothing() -> None:
    assert replaced("assert.equal(f(1), g(2));", "nothing") == ["g(2)"]
    ((_, _, becomes, _),) = contradicted("test('a', () => { assert.equal(f(1), g(\n2)); });")
    assert becomes.startswith("({ ")
    assert becomes.endswith(": 1 }\n)")
    ((_, _, becomes, _),) = contradicted(
        "test('a', () => { const x: number = 1; assert.equal(f(x), g(x)); });"
    )
    assert becomes.endswith(": 1 } as any)")


def test_a_literal_keeps_its_type_and_is_no_other_literal_of_the_test() -> None:
    for seed in range(20):
        found = contradicted(
            "test('a', () => { f(3); assert.deepEqual(g(), [4, 'ab', `x`, true, '']); });", seed
        )
        becomes = {was: new for one, was, new, _ in found if one.kind == "value"}
        assert becomes["4"] == "5"
        assert len(becomes["'ab'"]) == 4
        assert becomes["true"] == "false"
        assert becomes["''"] != "''"
        assert all(was != new for was, new in becomes.items())


def test_a_part_of_the_file_that_does_not_parse_is_not_changed() -> None:
    sound = "test('a', () => { assert.equal(f(1), 2); });\n"
    assert [was for _, was, *_ in contradicted(f"{sound}test('b', () => {{ assert.equal(f( ] ,, 3); ) }});")][
        :1
    ] == ["2"]


def test_each_test_has_a_limited_number_of_candidates() -> None:
    checks = "".join(
        f"assert.equal(f({number}), {number + 7}); assert.ok(g({number}));" for number in range(50)
    )
    kinds = [one.kind for one, *_ in contradicted(f"test('a', () => {{ {checks} }});")]
    assert kinds == ["value"] * 5 + ["opposite"] * 3
