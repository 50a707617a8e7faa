"""Java: the names of its tests, the outcomes in its runners' logs, and contradictions of what its tests expect."""

import random

import pytest

from workers.grading.controls.locating import FoundFunction, declared_in
from workers.grading.languages.java import LANGUAGE
from workers.grading.languages.language import MOST_PER_TEST

JUNIT5 = (
    "package calc;\nimport static org.junit.jupiter.api.Assertions.*;\nimport org.junit.jupiter.api.Test;\n"
)
JUNIT4 = "package calc;\nimport static org.junit.Assert.*;\nimport org.junit.Test;\n"
CSV = (
    '@ParameterizedTest @CsvSource({{"1, two, 3", "4, \'f, g\', 6"}}) void a(int a, String b, int c) {{ {} }}'
)


def contradicted(body: str, test: str = "T.a", head: str = JUNIT5) -> dict[tuple[str, str], set[str]]:
    """What is changed in the test of the class with this body, with the kind of the change, and what it becomes, over many draws."""
    source = f"{head}class T {{ {body} }}\n".encode()
    found: dict[tuple[str, str], set[str]] = {}
    for seed in range(60):
        for one in LANGUAGE.candidates(source, random.Random(seed)):
            if test in one.tests:
                for edit in one.edits:
                    found.setdefault((source[edit.start : edit.end].decode(), one.kind), set()).add(
                        edit.becomes
                    )
    return found


def values(body: str, **named: str) -> set[str]:
    """The literals that are changed."""
    return {text for text, kind in contradicted(body, **named) if kind == "value"}


def opposites(body: str, **named: str) -> set[tuple[str, str]]:
    """The other changes, each with what it becomes."""
    found = contradicted(body, **named)
    return {(text, one) for (text, kind), becomes in found.items() if kind == "opposite" for one in becomes}


def test_lines_of_maven_name_tests_with_their_class() -> None:
    log = (
        "[INFO] Running demo.CalcTest\noutput of adds\n"
        "[ERROR] Tests run: 16, Failures: 3, Errors: 1, Skipped: 2, Time elapsed: 0.008 s <<< FAILURE! -- in demo.CalcTest$Named\n"
        "[ERROR] demo.CalcTest.inherited -- Time elapsed: 0.434 s\n"
        "[ERROR] demo.CalcTest.breaks -- Time elapsed: 0.069 s <<< ERROR!\njava.lang.IllegalStateException: \nx\n"
        "[ERROR] demo.CalcTest.off skipped\n"
        "[ERROR] demo.CalcTest.rows(int, int, int)[3] -- Time elapsed: 0.007 s <<< FAILURE!\n"
        "[INFO] demo.CalcTest$Inner.deep -- Time elapsed: 1,002.5 s\n"
        "[ERROR] demo.CalcTest.older{int, int}[1]  Time elapsed: 0.05 s  <<< FAILURE!\n"
        "demo.OtherTest.fine  Time elapsed: 0.005 s\n"
        "old(demo.OldTest)  Time elapsed: 0.002 sec  <<< FAILURE!\n"
        "[ERROR]   CalcTest.rows:12 expected: <5> but was: <4>\n[ERROR] Tests run: 21, Failures: 4, Errors: 1, Skipped: 2\n"
    )
    assert LANGUAGE.outcomes(log) == {
        "demo.CalcTest.inherited": "PASSED",
        "demo.CalcTest.breaks": "FAILED",
        "demo.CalcTest.off": "SKIPPED",
        "demo.CalcTest.rows(int, int, int)[3]": "FAILED",
        "demo.CalcTest.older{int, int}[1]": "FAILED",
        "demo.CalcTest$Inner.deep": "PASSED",
        "demo.OtherTest.fine": "PASSED",
        "old(demo.OldTest)": "FAILED",
    }


def test_lines_of_gradle_name_tests_below_their_class() -> None:
    log = (
        "> Task :test FAILED\n\ncom.example.CalcTest > adds() PASSED\n\nCalcTest > Inner > deep() FAILED\n"
        "    org.opentest4j.AssertionFailedError at CalcTest.java:9\n\nCalcTest > rows(int) > [1] 5 PASSED\nCalcTest > off SKIPPED\n"
    )
    assert LANGUAGE.outcomes(log) == {
        "com.example.CalcTest > adds()": "PASSED",
        "CalcTest > Inner > deep()": "FAILED",
        "CalcTest > rows(int) > [1]": "PASSED",
        "CalcTest > off": "SKIPPED",
    }


TREE = """
.
+-- JUnit Jupiter [OK]
| +-- CalcTest [OK]
| | +-- inherited() [OK]
| | +-- breaks() [X] x
| | |     y
| | +-- assumes() [A] Assumption failed: assumption is not true
| | +-- off() [S] later
| | +-- rows(int, int) [OK]
| | | '-- [2] 2, 5 [X] expected: <5> but was: <4>
| | '-- A named nest [OK]
| |   '-- is named [OK]
| '-- OtherTest [X] @BeforeAll failed
'-- JUnit Vintage [OK]
  '-- FourTest [OK]
    '-- works[0: add 1] [OK]

Failures (2):
"""
OF_TREE = {
    "CalcTest > inherited()": "PASSED",
    "CalcTest > breaks()": "FAILED",
    "CalcTest > assumes()": "SKIPPED",
    "CalcTest > off()": "SKIPPED",
    "CalcTest > rows(int, int) > [2]": "FAILED",
    "CalcTest > A named nest > is named": "PASSED",
    "OtherTest": "FAILED",
    "FourTest > works[0: add 1]": "PASSED",
}


def test_the_leaves_of_the_launchers_tree_are_tests_in_both_alphabets_and_in_colours() -> None:
    assert LANGUAGE.outcomes(TREE) == OF_TREE
    letters = {"+-- ": "├─ ", "'-- ": "└─ ", "| ": "│  ", "[OK]": "✔", "[X]": "✘", "[A]": "■", "[S]": "↷"}
    drawn = TREE.replace("\n  '", "\n   '").replace("\n    '", "\n      '").replace("| |   '", "| |  '")
    for plain, letter in letters.items():
        drawn = drawn.replace(plain, letter)
    assert LANGUAGE.outcomes(drawn) == OF_TREE
    coloured = TREE.replace("[X]", "\x1b[31m[X]\x1b[0m").replace("+--", "\x1b[36m+--\x1b[0m")
    assert LANGUAGE.outcomes(coloured) == OF_TREE


def test_the_verbose_tree_has_the_outcome_below_the_test() -> None:
    log = (
        "├─ JUnit Jupiter\n│  ├─ CalcTest\n│  │  ├─ adds()\n│  │  │       tags: []\n"
        "│  │  │   uniqueId: [engine:junit-jupiter]/[class:demo.CalcTest]/[method:adds()]\n│  │  │     status: ✔ SUCCESSFUL\n"
        "│  │  ├─ breaks()\n│  │  │     caught: java.lang.IllegalStateException: x\n│  │  │     status: ✘ FAILED\n"
        "│  │  └─ CalcTest finished after 64 ms.\n"
    )
    assert LANGUAGE.outcomes(log) == {"CalcTest > adds()": "PASSED", "CalcTest > breaks()": "FAILED"}


def test_a_name_that_has_a_mark_in_it_is_not_the_outcome() -> None:
    log = (
        "├─ JUnit Jupiter ✔\n│  └─ CalcTest ✔\n│     ├─ cell=[X] ✔\n"
        "│     ├─ shows ✔ icon ✘ expected: <1> but was: <2>\n│     └─ shows [OK] ✘ expected: <1> but was: <2>\n"
    )
    assert LANGUAGE.outcomes(log) == {
        "CalcTest > cell=[X]": "PASSED",
        "CalcTest > shows": "FAILED",
        "CalcTest > shows [OK]": "FAILED",
    }


def test_a_printed_pass_does_not_hide_a_failure() -> None:
    printed = "+-- JUnit Jupiter [OK]\n| '-- CalcTest [OK]\n|   '-- breaks() [OK]\n\n"
    assert LANGUAGE.outcomes(TREE + printed)["CalcTest > breaks()"] == "FAILED"
    assert LANGUAGE.outcomes(printed + TREE)["CalcTest > breaks()"] == "FAILED"


NESTED = """package demo;
import org.junit.jupiter.api.*;
class CalcTest extends Base {
  @Test @DisplayName("adds (really)") void adds() { }
  @ParameterizedTest void rows(int a) { }
  void helper() { }
  @Nested @DisplayName("a nest") class Inner { @Test void deep() { } }
}
abstract class Base { @Test void inherited() { } }
"""


@pytest.mark.parametrize(
    ("name", "path", "function"),
    [
        ("demo.CalcTest.adds", "src/test/java/demo/CalcTest.java", "CalcTest.adds"),
        ("other.CalcTest.adds", "src/test/java/other/CalcTest.java", "CalcTest.adds"),
        ("demo.CalcTest.rows(int)[2]", "src/test/java/demo/CalcTest.java", "CalcTest.rows"),
        ("demo.CalcTest$Inner.deep", "src/test/java/demo/CalcTest.java", "CalcTest.Inner.deep"),
        ("rows(demo.CalcTest)", "src/test/java/demo/CalcTest.java", "CalcTest.rows"),
        ("only[0](other.CalcTest)", "src/test/java/other/CalcTest.java", "CalcTest.only"),
        ("CalcTest#only", "src/test/java/other/CalcTest.java", "CalcTest.only"),
        ("CalcTest > adds (really)", "src/test/java/demo/CalcTest.java", "CalcTest.adds"),
        ("CalcTest > rows(int) > [1]", "src/test/java/demo/CalcTest.java", "CalcTest.rows"),
        ("CalcTest > a nest > deep()", "src/test/java/demo/CalcTest.java", "CalcTest.Inner.deep"),
        ("CalcTest > [0: x] > only[0: x]", "src/test/java/other/CalcTest.java", "CalcTest.only"),
        ("CalcTest > inherited()", "src/test/java/demo/CalcTest.java", "CalcTest.inherited"),
        ("elsewhere.MoreTest.inherited", "src/test/java/demo/CalcTest.java", "Base.inherited"),
    ],
)
def test_a_name_of_a_runner_leads_to_its_method(name: str, path: str, function: str) -> None:
    other = b"package other;\nclass CalcTest { @Test public void adds() { } @Test public void only() { } }\n"
    texts = {
        "src/test/java/demo/CalcTest.java": NESTED.encode(),
        "src/test/java/other/CalcTest.java": other,
    }
    assert declared_in("java", texts, [], [name]) == {name: FoundFunction(path, function)}


def test_a_name_that_is_no_test_leads_nowhere() -> None:
    texts = {"src/test/java/demo/CalcTest.java": NESTED.encode()}
    assert declared_in("java", texts, [], ["demo.CalcTest.helper", "CalcTest", "", "no name", " > "]) == {}


def test_methods_of_a_test_case_of_junit_3_are_tests() -> None:
    source = b"public class OldTest extends junit.framework.TestCase { public void testA() { } public void a() { } }"
    assert [one.name for one in LANGUAGE.tests(source)] == ["OldTest.testA"]


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        ("@Test void a() { assertEquals(3, f(1, 2)); }", {"3"}),
        ('@Test void a() { assertEquals(3L, f(1), "no 9"); }', {"3L"}),
        ("@Test void a() { String want = \"ab\"; assertEquals(want, f(1)); }", {'"ab"'}),
        ("static final char MOST = 'x'; @Test void a() { assertEquals(MOST, f(1)); }", {"'x'"}),
        ("@Test void a() { assertArrayEquals(new int[] {4, 5}, f(1)); }", {"4", "5"}),
        ("@Test void a() { assertEquals(Arrays.asList(4, 5), f(List.of(1))); }", {"4", "5"}),
        ("@Test void a() { List<Integer> w = new ArrayList<>(); w.add(4); assertEquals(w, f(1)); }", {"4"}),
        ("@Test void a() { check(f(1), 7); } void check(int got, int want) { assertEquals(want, got); }", {"7"}),
        ("@Test void a() { each(f(1), 7, 8); } void each(int got, int... want) { assertArrayEquals(want, got); }", {"7", "8"}),
        ("@Test void a() { int w = 7; check(f(1), w); } void check(int g, int w) { assertEquals(w, g); }", {"7"}),
        ("@Test void a() { for (int w : new int[] {1, 2}) { assertEquals(w, f()); } }", {"1", "2"}),
        ("@Test void a() { int[] w = {1, 2}; assertEquals(w[0], f(3)); }", {"1", "2"}),
        ("@Test void a() { assertEquals(new BigDecimal(\"1.5\"), f(1)); }", {'"1.5"'}),
        ("@Test void a() { assertTrue(f(1).contains(\"ab\")); assertFalse(f(1).contains(\"cd\")); }", {'"ab"'}),
        ("@Test void a() { assertTrue(f(1) == 5 && g(2).equals(6)); }", {"5", "6"}),
        ("@Test void a() { if (f(1) != 4) { fail(\"9\"); } }", {"4"}),
        ("@Test void a() { assertThat(f(1)).isEqualTo(4).isNotEqualTo(5); }", {"4"}),
        ("@Test void a() { assertThat(f(1)).hasSize(2).containsExactly(\"a\", \"b\"); }", {"2", '"a"', '"b"'}),
        ("@Test void a() { assertThat(f(1), is(4)); assertThat(f(2), not(equalTo(5))); }", {"4"}),
        ("@Test void a() { assertThat(\"why\", f(1), both(hasItem(4)).and(hasSize(3))); }", {"3"}),
        ("@Test void a() { thrown.expectMessage(\"no\"); f(1); }", {'"no"'}),
        (CSV.format("assertEquals(c, f(a, b));"), {"3", "6"}),
        (CSV.format("assertEquals(b, f(a, c));"), {"two", "f, g"}),
        (
            "static Stream<Arguments> rows() { return Stream.of(Arguments.of(1, 2), Arguments.of(3, 4)); }\n"
            '@ParameterizedTest @MethodSource("rows") void a(int in, int want) { assertEquals(want, f(in)); }',
            {"2", "4"},
        ),
        (
            "@Parameters static Object[][] rows() { return new Object[][] {{1, 2}, {3, 4}}; } int in, want;\n"
            "T(int in, int w) { this.in = in; this.want = w; } @Test void a() { assertEquals(want, f(in)); }",
            {"2", "4"},
        ),
        ("static class B { } @Nested class N { @Test void b() { } } @Test void a() { assertEquals(1, f()); }", {"1"}),
    ],
)  # fmt: skip
def test_an_expected_literal_is_changed_and_no_input(body: str, changed: set[str]) -> None:
    assert values(body) == changed


def test_the_message_comes_first_in_junit_4_and_last_in_junit_5() -> None:
    body = '@Test public void a() { assertEquals("one", "two", f(1)); assertTrue("three", g()); }'
    assert values(body, head=JUNIT4) == {'"two"'}
    assert opposites(body, head=JUNIT4) == {("g()", "!(g())")}
    assert values(body) == {'"one"', '"two"'}
    assert values(body, head=JUNIT4.replace("org.junit.Assert.*", "org.testng.Assert.*")) == {
        '"one"',
        '"two"',
    }
    assert values('@Test public void a() { assertEquals("one", f(1), 2); }', head=JUNIT4) == {"2"}
    qualified = '@Test public void a() { Assert.assertEquals("one", 2, f(1)); }'
    assert values(qualified, head="import org.junit.Assert;\n") == {"2"}


def test_a_number_leaves_the_tolerance_and_keeps_its_type() -> None:
    assert contradicted("@Test void a() { assertEquals(3.141f, f(1), 0.01f); }") == {
        ("3.141f", "value"): {"4.141f"}
    }
    found = contradicted(
        "@Test void a() { assertEquals(-2147483648, f()); assertEquals(07, f()); assertEquals(0x1F, f()); }"
    )
    assert found["2147483648", "value"] == {"2147483647"}
    assert found["07", "value"] == {"06"}
    assert all(one.startswith("0x1") for one in found["0x1F", "value"])


@pytest.mark.parametrize(
    ("statement", "changed"),
    [
        ("assertTrue(f(1));", {("f(1)", "!(f(1))")}),
        ("assertFalse(x > 2, \"m\");", {("x > 2", "!(x > 2)")}),
        ("assertNull(f(1));", {("f(1)", "((f(1)) == null ? new Object() : null)")}),
        ("assertNotEquals(f(1), x);", {("f(1)", "x")}),
        ("assertThrows(E.class, () -> f(1));", {("E.class", "StackOverflowError.class")}),
        ("E e = assertThrows(E.class, () -> f(1));", {("E.class", "(Class<E>) (Class<?>) StackOverflowError.class")}),
        ("assertThat(f(1)).isTrue();", {("f(1)", "!(f(1))")}),
        ("assertThat(f(1), nullValue());", {("nullValue()", "org.hamcrest.CoreMatchers.not(nullValue())")}),
        ("assertThatThrownBy(() -> f(1)).isInstanceOf(E.class);", {("E.class", "StackOverflowError.class")}),
        ("try { f(1); fail(); } catch (E e) { }", {("{", "{ if (true) throw new AssertionError();")}),
        ("assert f(1);", {("f(1)", "!(f(1))")}),
        ("assertTrue(() -> f(1));", set[tuple[str, str]]()),
    ],
)  # fmt: skip
def test_what_has_no_value_is_reversed(statement: str, changed: set[tuple[str, str]]) -> None:
    assert opposites(f"@Test void a() {{ {statement} }}") == changed


def test_the_error_that_the_annotation_expects_is_another() -> None:
    body = "@Test(expected = E.class) public void a() { f(1); }"
    assert opposites(body, head=JUNIT4) == {("E.class", "StackOverflowError.class")}


def test_an_expectation_without_a_literal_becomes_a_value_of_another_type_and_is_still_evaluated() -> None:
    found = contradicted("@Test void a() { assertEquals(x = g(), f(1)); }")
    assert found["x = g()", "nothing"] == {"java.util.Collections.singletonList(x = g())"}
    found = contradicted("@Test void a() { assertArrayEquals(g(), f(1)); }")
    assert found == {("g()", "nothing"): {"java.util.Arrays.copyOf(g(), 9973)"}}


def test_a_value_that_the_code_gets_as_well_is_not_changed() -> None:
    assert values("@Test void a() { int w = 5; int got = f(w); assertEquals(w, got); }") == set()
    assert values("@Test void a() { int w = 5; assertEquals(w, f(w)); }") == set()
    assert values("@Test void a() { for (int w : new int[] {1}) { f(w); assertEquals(w, g()); } }") == set()
    shared = "void both(int x) { assertEquals(x, f(x)); } @Test void a() { both(5); }"
    assert values(shared) == set()
    assert (
        values(
            "static final int W = 5; void make() { f(W); } @Test void a() { make(); assertEquals(W, g()); }"
        )
        == set()
    )
    assert values('@Test void a() { assertEquals(Jsoup.parse("x"), g()); }') == set()


def test_a_helper_contradicts_each_test_that_calls_it() -> None:
    body = "@Test void a() { check(); } @Test void b() { check(); } @Test void c() { } void check() { assertEquals(3, f()); }"
    source = f"{JUNIT5}class T {{ {body} }}\n".encode()
    found = LANGUAGE.candidates(source, random.Random(1))
    assert found
    assert {one.tests for one in found} == {("T.a", "T.b")}


def test_a_test_of_a_superclass_in_the_file_is_one_of_each_class() -> None:
    source = f"{JUNIT5}abstract class B {{ @Test void a() {{ assertEquals(3, f()); }} }} class T extends B {{ }} class U extends B {{ }}\n"
    found = LANGUAGE.candidates(source.encode(), random.Random(1))
    assert {one.tests for one in found} == {("B.a", "T.a", "U.a")}


@pytest.mark.parametrize(
    "source",
    [b"", b"\xff\xfe", b"class T { @Test void a() {", b"not java at all {{{",
    b"class T { @Test void a() { assertEquals(); assertTrue(); assertThat(); } }"],
)  # fmt: skip
def test_a_file_that_does_not_parse_breaks_nothing(source: bytes) -> None:
    LANGUAGE.tests(source)
    LANGUAGE.candidates(source, random.Random(1))


def test_names_that_are_given_to_each_other_are_followed_once() -> None:
    names = "abcdefghijklmnop"
    fields = "".join(f'static String {one} = "{one}1" + {" + ".join(names)};' for one in names)
    found = LANGUAGE.candidates(
        f"{JUNIT5}class T {{ {fields} @Test void t() {{ assertEquals(a, f()); }} }}".encode(),
        random.Random(1),
    )
    assert sum(one.kind == "value" for one in found) == MOST_PER_TEST["value"]


def test_a_large_file_is_read_in_linear_time() -> None:
    rows = "".join(f'"{n}, {n + 1}",\n' for n in range(3000))
    body = (
        f"@ParameterizedTest @CsvSource({{{rows}}}) void a(int in, int want) {{ assertEquals(want, f(in)); }}"
    )
    assert LANGUAGE.candidates(f"{JUNIT5}class T {{ {body} }}\n".encode(), random.Random(1))
