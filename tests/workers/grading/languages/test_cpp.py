"""C and C++: the names of their tests, the outcomes in their logs, and contradictions of what their tests expect."""

import random

import pytest

from workers.grading.controls.locating import FoundFunction, declared_in
from workers.grading.languages.cpp import LANGUAGE
from workers.grading.languages.language import language_of, languages_of, reporting

GTEST = """[==========] Running 4 tests from 2 test suites.
[ RUN      ] Calc.Adds
out[       OK ] Calc.Adds (0 ms)
[ RUN      ] Calc.Skips
[  SKIPPED ] Calc.Skips (0 ms)
[ RUN      ] Pre/P.Is/1
a_test.cpp:14: Failure
[  FAILED  ] Pre/P.Is/1, where GetParam() = 2 (0 ms)
[==========] 4 tests from 2 test suites ran. (1 ms total)
[  PASSED  ] 1 test.
[  FAILED  ] 1 test, listed below:
[  FAILED  ] Pre/P.Is/1, where GetParam() = 2

 1 FAILED TEST
"""
CTEST = """test 1
    Start 1: sums
1/6 Test #1: sums .........................   Passed    0.01 sec
2/6 Test  #2: a name to the end of the line ...   Passed    0.01 sec
3/6 Test #3: segv .........................***Exception: SegFault  0.13 sec
4/6 Test #4: add ..........................Subprocess aborted***Exception:   0.00 sec
5/6 Test #5: off ..........................***Not Run (Disabled)   0.00 sec
6/6 Test #6: late .........................***Timeout   1.00 sec
"""
DASHES, DOTS, DOUBLE = "-" * 79, "." * 79, "=" * 79


def contradicted(source: str, test: str = "S.A") -> set[tuple[str, str]]:
    """What is changed in a test, and the kind of each change, over many draws."""
    found: set[tuple[str, str]] = set()
    for seed in range(20):
        for one in LANGUAGE.candidates(source.encode(), random.Random(seed)):
            if test in one.tests:
                found |= {(source.encode()[edit.start : edit.end].decode(), one.kind) for edit in one.edits}
    return found


def becomes(source: str, was: str) -> set[str]:
    """What a part of the source is replaced by, over many draws."""
    found: set[str] = set()
    for seed in range(20):
        for one in LANGUAGE.candidates(source.encode(), random.Random(seed)):
            found |= {
                edit.becomes for edit in one.edits if source.encode()[edit.start : edit.end].decode() == was
            }
    return found


def in_test(body: str) -> str:
    return f"TEST(S, A) {{\n  {body}\n}}\n"


def values(source: str, test: str = "S.A") -> set[str]:
    return {text for text, kind in contradicted(source, test) if kind == "value"}


def opposites(source: str) -> set[str]:
    return {text for text, kind in contradicted(source) if kind == "opposite"}


def test_a_log_of_googletest_names_tests_and_its_summary_does_not() -> None:
    assert LANGUAGE.outcomes(GTEST) == {
        "Calc.Adds": "PASSED",
        "Calc.Skips": "SKIPPED",
        "Pre/P.Is/1": "FAILED",
    }


def test_a_test_that_began_and_did_not_end_has_failed() -> None:
    assert LANGUAGE.outcomes("[ RUN      ] S.A\nAborted\n") == {"S.A": "FAILED"}


def test_a_log_of_ctest_names_its_programs() -> None:
    assert LANGUAGE.outcomes(CTEST) == {
        "sums": "PASSED",
        "a name to the end of the line": "PASSED",
        "segv": "FAILED",
        "add": "FAILED",
        "off": "SKIPPED",
        "late": "FAILED",
    }


def test_a_program_of_ctest_that_names_its_tests_is_none_itself() -> None:
    inner = "1: [ RUN      ] S.A\n1: [       OK ] S.A (0 ms)\n"
    found = LANGUAGE.outcomes(inner + CTEST)
    assert "sums" not in found
    assert found["S.A"] == "PASSED"


@pytest.mark.parametrize(
    "log",
    [
        f"{DASHES}\nadds\n  more\n{DASHES}\na.cpp:4\n{DOTS}\n\na.cpp:4: PASSED:\n  CHECK( x )\n\na.cpp:5: FAILED:\n"
        f"{DASHES}\nplain\n{DASHES}\na.cpp:5\n{DOTS}\n\na.cpp:5: PASSED:\n{DOUBLE}\ntest cases: 2 | 1 passed | 1 failed\n",
        '<TestCase name="adds" tags="[a]" filename="a.cpp">\n<Expression success="false"/>\n<OverallResult success="false"/>\n</TestCase>\n'
        '<TestCase name="plain" filename="a.cpp"><OverallResult success="true"/></TestCase>\n',
        '<testcase classname="c.global" name="adds" time="0.0" status="run">\n<failure message="x">\n</failure></testcase>\n'
        '<testcase classname="c.global" name="plain" time="0.0" status="run"/>\n',
        f"{DOUBLE}\na.cpp:4:\nTEST CASE:  adds\n  more\n\na.cpp:4: ERROR: CHECK( x ) is NOT correct!\n\n{DOUBLE}\n"
        "a.cpp:5:\nTEST SUITE: s\nTEST CASE:  plain\n\na.cpp:5: SUCCESS: CHECK( x ) is correct!\n",
        "PASS: plain\nFAIL: adds\n# TOTAL: 2\n",
        "PASS: plain 1 - x\nPASS: adds 1 - y\nFAIL: adds 2 takes nothing\n",
        "PASS: plain 1\nPASS: adds 1 - y\nERROR: adds - too few tests run (expected 5, got 2)\n",
        "t/a.c:4:adds:FAIL: Expected 3 Was 4\nt/a.c:9:plain:PASS\n",
        "1/2 adds      FAIL            0.01s   exit status 1\n2/2 plain     OK              0.01s\n",
        "[ RUN      ] adds\n[  FAILED  ] adds\n[ RUN      ] plain\n[       OK ] plain (0 ms)printed at the end\n"
        "[  FAILED  ] 1 test(s), listed below:\n"
        "[  FAILED  ] adds\n",
    ],
)  # fmt: skip
def test_the_reports_of_other_frameworks_name_tests(log: str) -> None:
    assert LANGUAGE.outcomes(log) == {"adds": "FAILED", "plain": "PASSED"}


def test_ctest_prints_the_output_of_its_programs() -> None:
    assert reporting(b"ctest --test-dir build -j2\n") == b"ctest -V --test-dir build -j2\n"


@pytest.mark.parametrize(
    "script", ["ctest --test-dir build", "g++ -o t t.cpp && ./t", "cmake --build b\nb/calc_test", "ninja -C b test"]
)  # fmt: skip
def test_scripts_that_build_programs_may_use_the_language(script: str) -> None:
    assert "c" in languages_of(script)
    assert language_of("a/test_a.cpp") == language_of("a/test_a.c") == "c"


@pytest.mark.parametrize(
    ("name", "path", "function"),
    [
        ("S.A", "tests/a_test.cpp", "S.A"),
        ("Pre/P.B/0", "tests/a_test.cpp", "P.B"),
        ("Ty/0.C", "tests/a_test.cpp", "Ty.C"),
        ("adds numbers", "tests/b_test.cpp", "adds numbers"),
        ("adds numbers/more", "tests/b_test.cpp", "adds numbers"),
        ("Scenario: a scene", "tests/b_test.cpp", "Scenario: a scene"),
        ("test_sums", "tests/test_c.c", "test_sums"),
        ("d", "tests/test_d.c", "main"),
        ("d_test", "tests/test_d.c", "main"),
        ("test_d", "tests/test_d.c", "main"),
        ("tests/test_d", "tests/test_d.c", "main"),
    ],
)
def test_a_name_of_the_runner_leads_to_its_test(name: str, path: str, function: str) -> None:
    texts = {
        "tests/a_test.cpp": b"TEST(S, A) {}\nTEST_P(P, B) {}\nTYPED_TEST(Ty, C) {}\n",
        "tests/b_test.cpp": b'TEST_CASE("adds numbers", "[a]") {}\nSCENARIO("a scene") {}\n',
        "tests/test_c.c": b"static void test_sums(void **state) {}\nint main(void) { cmocka_unit_test(test_sums); }\n",
        "tests/test_d.c": b"int main(void) { return 0; }\n",
    }
    assert declared_in("c", texts, [], [name]) == {name: FoundFunction(path, function)}


def test_a_program_without_a_file_of_its_name_leads_nowhere_among_several() -> None:
    texts = {path: b"int main(void) { return 0; }\n" for path in ("tests/test_a.c", "tests/deep/test_b.c")}
    assert declared_in("c", texts, [], ["other", "a"]) == {"a": FoundFunction("tests/test_a.c", "main")}


def test_a_program_is_looked_for_in_the_file_of_its_name_before_the_only_hidden_one() -> None:
    texts = {f"tests/test_{one}.c": b"int main(void) { return 0; }\n" for one in "abc"}
    found = declared_in("c", texts, ["tests/test_a.c"], ["a", "b", "test_c", "other"])
    assert {name: one.path for name, one in found.items()} == {
        "a": "tests/test_a.c",
        "b": "tests/test_b.c",
        "test_c": "tests/test_c.c",
        "other": "tests/test_a.c",
    }


def test_a_test_that_several_files_have_is_no_program() -> None:
    texts = {f"tests/{one}_test.cpp": b"TEST(Old, Sums) {}\n" for one in "ab"}
    texts["tests/new_test.cpp"] = b"TEST(New, Sums) {}\n"
    assert declared_in("c", texts, ["tests/new_test.cpp"], ["Old.Sums"]) == {}
    hidden = ["tests/a_test.cpp", "tests/new_test.cpp"]
    assert declared_in("c", texts, hidden, ["Old.Sums", "program"]) == {
        "Old.Sums": FoundFunction("tests/a_test.cpp", "Old.Sums")
    }


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        (in_test("EXPECT_EQ(add(1, 2), 3) << 4;"), {"3"}),
        (in_test("ASSERT_EQ(-3, add(1, 2));"), {"-3"}),
        (in_test('const std::string want = "ab"; EXPECT_EQ(f(1), want);'), {'"ab"'}),
        (in_test('EXPECT_STREQ("ab", f(1));'), {'"ab"'}),
        (in_test("EXPECT_TRUE(f(1) == 4 && g(2)); EXPECT_FALSE(f(2) != 5); EXPECT_FALSE(f(3) == 6);"), {"4", "5"}),
        (in_test("std::vector<int> want{4, 5}; EXPECT_EQ(f(1), want);"), {"4", "5"}),
        (in_test("EXPECT_EQ(f(1), (std::vector<int>{4, 5}));"), {"4", "5"}),
        (in_test("EXPECT_THAT(f(1), ElementsAre(4, 5)); EXPECT_THAT(f(1), SizeIs(2));"), {"4", "5", "2"}),
        (in_test("auto check = [](int a, int want) { EXPECT_EQ(f(a), want); }; check(1, 7);"), {"7"}),
        (f"void check(int a, int want) {{ EXPECT_EQ(f(a), want); }}\n{in_test('check(1, 7);')}", {"7"}),
        (f"namespace n {{ constexpr int kMost = 9; }}\n{in_test('EXPECT_EQ(f(1), n::kMost);')}", {"9"}),
        (f"#define SAME(a, b) EXPECT_EQ(f(a), b)\n{in_test('SAME(1, 7);')}", {"7"}),
        (in_test("for (auto [a, want] : {std::pair{1, 4}, std::pair{2, 5}}) EXPECT_EQ(f(a), want);"), {"4", "5"}),
        (in_test("const std::map<int, int> m = {{1, 4}}; for (const auto& p : m) EXPECT_EQ(f(p.first), p.second);"), {"4"}),
        ("class S : public ::testing::Test {\n  int want = 8;\n};\nTEST_F(S, A) { EXPECT_EQ(f(1), want); }\n", {"8"}),
        ("TEST_P(S, A) { EXPECT_EQ(f(std::get<0>(GetParam())), std::get<1>(GetParam())); }\n"
         "INSTANTIATE_TEST_SUITE_P(P, S, testing::Values(std::make_tuple(1, 4)));\n", {"4"}),
        ("TEST_P(S, A) { auto [in, want] = GetParam(); EXPECT_EQ(f(in), want); }\n"
         "INSTANTIATE_TEST_SUITE_P(P, S, testing::Values(std::make_tuple(1, 4)));\n", {"4"}),
        ("struct Row { int in; int want; };\nconst Row kRows[] = {{1, 4}, {2, 5}};\n"
         "TEST_P(S, A) { EXPECT_EQ(f(GetParam().in), GetParam().want); }\n"
         "INSTANTIATE_TEST_SUITE_P(P, S, testing::ValuesIn(kRows));\n", {"4", "5"}),
    ],
)  # fmt: skip
def test_an_expected_literal_is_changed_and_no_input(source: str, changed: set[str]) -> None:
    assert values(source) == changed


@pytest.mark.parametrize("rows", ["{1, 4}, {2, 5}", "{.in = 1, .want = 4}, {.in = 2, .want = 5}", "Row{1, 4}, Row{2, 5}"])  # fmt: skip
@pytest.mark.parametrize(
    "table", ["const Row rows[] = {{{}}};", "std::vector<Row> rows = {{{}}};", "std::vector<Row> rows{{{}}};"]
)
@pytest.mark.parametrize(
    "loop",
    ["for (const Row& row : rows) EXPECT_EQ(f(row.in), row.want);",
     "for (size_t i = 0; i < 2; i++) EXPECT_EQ(f(rows[i].in), rows[i].want);"],
)  # fmt: skip
def test_the_compared_column_of_a_table_is_changed(rows: str, table: str, loop: str) -> None:
    filled = table.replace("{{{}}}", "{" + rows + "}")
    assert values(f"struct Row {{ int in, want; }};\n{in_test(f'{filled} {loop}')}") == {"4", "5"}


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        ('REQUIRE(f(1) == 4); CHECK_FALSE(f(2) != 5); CHECK(f("a") == "b");', {"4", "5", '"b"'}),
        ('SECTION("of three") { REQUIRE(f(3) == 6); }', {"6"}),
        ("CHECK_EQ(f(1), 7); REQUIRE_THAT(f(1), Equals(8));", {"7", "8"}),
        ('REQUIRE_THROWS_WITH(f(1), "bad");', {'"bad"'}),
    ],
)
def test_expected_literals_of_catch_and_doctest_are_changed(body: str, changed: set[str]) -> None:
    assert values(f'TEST_CASE("a, (b)", "[c]") {{\n{body}\n}}\n', "a, (b)") == changed


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        ("assert(f(1) == 4);", {"4"}),
        ('assert(strcmp(f(1), "ab") == 0);', {'"ab"'}),
        ('assert(!strcmp("ab", f(1)));', {'"ab"'}),
        ('if (f(1) != 4) { printf("%d", 5); return 1; }', {"4"}),
        ("if (f(1) == 4) puts(); else exit(1);", {"4"}),
        ("if (f(1) != 4) failures++;", {"4"}),
        (
            "assert_int_equal(f(1), 4); ck_assert_int_eq(f(2), 5); TEST_ASSERT_EQUAL_INT(6, f(3));",
            {"4", "5", "6"},
        ),
    ],
)
def test_expected_literals_of_a_program_in_c_are_changed(body: str, changed: set[str]) -> None:
    source = f"#include <assert.h>\nint main(void) {{\n  {body}\n  return 0;\n}}\n"
    assert values(source, "main") == changed


@pytest.mark.parametrize(
    ("check", "was", "other"),
    [
        ("EXPECT_EQ(f(1), g(2))", "f(1), g(2)", "(f(1)) == (g(2)), 0"),
        ("EXPECT_NE(f(1), 3)", "f(1), 3", "(f(1)) != (3), 1"),
        ("EXPECT_LE(f(1), 3)", "f(1), 3", "(f(1)) <= (3), 0"),
        ("EXPECT_GT(f(1), 3)", "f(1), 3", "!((f(1)) > (3)), 0"),
        ("ASSERT_TRUE(f(1))", "f(1)", "!(f(1))"),
        ("EXPECT_NEAR(f(1), g(1), 0.1)", "0.1", "-1.0"),
        ("EXPECT_THROW(f(1), std::out_of_range)", "std::out_of_range", "std::bad_alloc"),
        ("EXPECT_THROW({ f(1); g(); }, std::bad_alloc)", "std::bad_alloc", "std::bad_cast"),
        ("EXPECT_NO_THROW(f(1))", "f(1)", "f(1); throw 1"),
        ("REQUIRE_NOTHROW(f(1))", "f(1)", "((void)(f(1)), throw 1)"),
        ("EXPECT_ANY_THROW(f(1))", "f(1)", "[&] { try { f(1); } catch (...) {} }()"),
        ("EXPECT_THAT(f(1), IsEmpty())", "IsEmpty()", "::testing::Not(IsEmpty())"),
        ("REQUIRE_THAT(f(1), IsEmpty())", "IsEmpty()", "!(IsEmpty())"),
        ("EXPECT_STREQ(f(1), g(1))", "g(1)", '"\\001"'),
        ("TEST_ASSERT_NULL(f(1))", "f(1)", "(f(1)) ? NULL : (void *)1"),
    ],
)
def test_where_no_value_is_written_the_opposite_is_expected(check: str, was: str, other: str) -> None:
    assert becomes(in_test(f"{check};"), was) == {other}


@pytest.mark.parametrize(
    "check",
    ["EXPECT_NEAR(f(1), 3.25, 0.5)", "EXPECT_DOUBLE_EQ(3.25, f(1))", "REQUIRE(f(1) == Approx(3.25).epsilon(0.1))"],
)  # fmt: skip
def test_a_number_with_a_tolerance_becomes_one_far_away(check: str) -> None:
    found = {float(text) for text in becomes(in_test(f"{check};"), "3.25")}
    assert found
    assert all(abs(number - 3.25) > 1 for number in found)


@pytest.mark.parametrize(
    ("literal", "among"),
    [
        ("07", {f"0{n}" for n in range(7)}),
        ("0b101", {"0b100"}),
        ("0x1F", {f"0x1{d}" for d in "0123456789abcde"}),
        ("5u", {"4u", "6u"}),
        (".5", {f"0.{n}" for n in range(10)} - {"0.5"}),
        ("'a'", {f"'{c}'" for c in "bcdefghijklmnopqrstuvwxyz"}),
        ("true", {"false"}),
        ('R"(7)"', {f'R"({n})"' for n in "012345689"}),
    ],
)
def test_another_literal_is_one_of_the_same_form(literal: str, among: set[str]) -> None:
    found = becomes(in_test(f"EXPECT_EQ(f(1), {literal});"), literal)
    assert found
    assert found <= among


def test_a_value_that_the_code_gets_as_well_is_not_changed() -> None:
    assert not values(in_test("int want = 5; EXPECT_EQ(f(want), want);"))
    assert not values(
        in_test(
            'std::vector<std::string> names{"a"}; for (auto& n : names) add(n); EXPECT_EQ(f(), names[0]);'
        )
    )


def test_the_counter_of_a_loop_is_not_changed() -> None:
    assert not values(in_test("for (int i = 0; i < 3; i++) EXPECT_EQ(v[i], i);"))


def test_a_helper_contradicts_each_test_that_calls_it_and_the_program() -> None:
    source = "static void check() { EXPECT_EQ(f(), 3); }\nTEST(S, A) { check(); }\nTEST(S, B) { check(); }\nTEST(S, C) {}\n"
    for one in LANGUAGE.candidates(source.encode(), random.Random(1)):
        assert one.tests == ("S.A", "S.B", "main")


def test_macros_in_comments_and_texts_open_no_test() -> None:
    source = (
        '// x\n/*\nTEST(S, B) {}\n*/\nconst char* a = "\\\nTEST(S, C)";\nTEST(S, A) { EXPECT_EQ(f(1), 3); }\n'
    )
    assert [test.name for test in LANGUAGE.tests(source.encode())] == ["S.A", "main"]
    assert values(source) == {"3"}


@pytest.mark.parametrize(
    "source", [b"", b"\xff\xfe", b"TEST(S, A", b"TEST(S, A) {", b"TEST_CASE() {}", b"#if {{{ (("]
)
def test_a_file_that_does_not_parse_breaks_nothing(source: bytes) -> None:
    LANGUAGE.tests(source)
    LANGUAGE.candidates(source, random.Random(1))


def test_a_large_file_is_read_in_linear_time() -> None:
    rows = "".join(f"  {{{n}, {n + 1}}},\n" for n in range(3000))
    source = (
        f"struct Row {{ int in, want; }};\nconst Row rows[] = {{\n{rows}}};\n"
        f"{in_test('for (auto& row : rows) EXPECT_EQ(f(row.in), row.want);')}"
    )
    assert LANGUAGE.candidates(source.encode(), random.Random(1))
