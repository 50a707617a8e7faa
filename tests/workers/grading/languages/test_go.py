"""Go: the names of its tests, the outcomes in its logs, and contradictions of what its tests expect."""

import random

import pytest

from workers.grading.controls.locating import FoundFunction, declared_in
from workers.grading.languages.go import LANGUAGE

CHECK = "func check(t *testing.T, got, want int) {\n\tif got != want {\n\t\tt.Fatal()\n\t}\n}\n"
HEAD = 'package calc\n\nimport "testing"\n\n'


def contradicted(body: str, test: str = "TestA") -> set[tuple[str, str]]:
    """What is changed in the test whose body this is, and the kind of each change, over many draws."""
    source = f"{HEAD}{body}".encode()
    found: set[tuple[str, str]] = set()
    for seed in range(60):
        for one in LANGUAGE.candidates(source, random.Random(seed)):
            if test in one.tests:
                found |= {(source[edit.start : edit.end].decode(), one.kind) for edit in one.edits}
    return found


def test_log_lines_name_tests_with_their_package() -> None:
    log = (
        "=== RUN   TestA\n--- PASS: TestA (0.00s)\n    --- PASS: TestA/x (0.00s)\n    --- SKIP: TestA/y (0.00s)\nPASS\n"
        "ok  \texample.com/m/a\t0.003s\n?   \texample.com/m/c\t[no test files]\n"
        "out--- FAIL: TestA (0.10s)\n    a_test.go:7: 3\nFAIL\nFAIL\texample.com/m/b\t0.004s\nFAIL\n"
    )
    assert LANGUAGE.outcomes(log) == {
        "example.com/m/a.TestA": "PASSED",
        "example.com/m/a.TestA/x": "PASSED",
        "example.com/m/a.TestA/y": "SKIPPED",
        "example.com/m/b.TestA": "FAILED",
    }


def test_json_lines_name_tests_with_their_package() -> None:
    log = (
        '{"Time":"2026-01-01T00:00:00Z","Action":"run","Package":"m/a","Test":"TestA"}\n'
        '{"Action":"pass","Package":"m/a","Test":"TestA","Elapsed":0}\n{"Action":"pass","Package":"m/a"}\n{"Action"\n'
    )
    assert LANGUAGE.outcomes(log) == {"m/a.TestA": "PASSED"}
    output = '{"Action":"output","Package":"m/a","Test":"TestA","Output":"--- PASS: TestA (0.00s)\\n"}\n'
    assert LANGUAGE.outcomes(f"{output}{log}--- FAIL: TestB (0.00s)\n") == {
        "m/a.TestA": "PASSED",
        "TestB": "FAILED",
    }


def test_a_printed_pass_does_not_hide_a_failure() -> None:
    log = "--- PASS: TestA (0.00s)\n--- FAIL: TestA (0.00s)\n--- PASS: TestA (0.00s)\nFAIL\tm\t0.1s\n"
    assert LANGUAGE.outcomes(log) == {"m.TestA": "FAILED"}


@pytest.mark.parametrize(
    ("name", "path", "function"),
    [
        ("example.com/m.TestA", "a_test.go", "TestA"),
        ("example.com/m/sub.TestA/case_1", "sub/a_test.go", "TestA"),
        ("TestOnly/x", "sub/a_test.go", "TestOnly"),
        ("example.com/m/sub.TestSuite/TestMethod", "sub/a_test.go", "Suite.TestMethod"),
        ("example.com/m/sub.TestSuite", "sub/a_test.go", "TestSuite"),
        ("ExampleB", "a_test.go", "ExampleB"),
    ],
)
def test_a_name_of_the_runner_leads_to_its_function(name: str, path: str, function: str) -> None:
    texts = {
        "a_test.go": f"{HEAD}func TestA(t *testing.T) {{}}\nfunc ExampleB() {{}}\nfunc Testing() {{}}\n".encode(),
        "sub/a_test.go": (
            f"{HEAD}func TestA(t *testing.T) {{}}\nfunc TestOnly(t *testing.T) {{}}\n"
            "func TestSuite(t *testing.T) {}\nfunc (s *Suite) TestMethod() {}\n"
        ).encode(),
    }
    assert declared_in("go", texts, [], [name]) == {name: FoundFunction(path, function)}


def test_a_name_that_two_packages_have_leads_nowhere() -> None:
    texts = {
        path: f"{HEAD}func TestA(t *testing.T) {{}}\n".encode() for path in ("x/a_test.go", "y/a_test.go")
    }
    assert declared_in("go", texts, [], ["TestA", "Testing", "no name"]) == {}


def test_the_package_in_a_name_decides_and_a_hidden_test_where_there_is_none() -> None:
    texts = {
        path: f"{HEAD}func TestA(t *testing.T) {{}}\n".encode() for path in ("x/a_test.go", "y/z/a_test.go")
    }
    names = ["m/x.TestA", "m/y/z.TestA", "TestA"]
    for hidden in ("x/a_test.go", "y/z/a_test.go"):
        found = declared_in("go", texts, [hidden], names)
        assert [found[name].path for name in names] == [*texts, hidden]
    texts |= {path: texts["x/a_test.go"] for path in ("z/a_test.go", "v/a_test.go")}
    assert declared_in("go", texts, ["z/a_test.go", "v/a_test.go"], ["TestA"]) == {}


@pytest.mark.parametrize(
    ("body", "values"),
    [
        ("func TestA(t *testing.T) {\n\tif got := Add(1, 2); got != 3 {\n\t\tt.Error(got)\n\t}\n}\n", {"3"}),
        ("func TestA(t *testing.T) {\n\tif s := F(1); s == \"ab\" {\n\t\tt.Log()\n\t} else {\n\t\tt.Fatal()\n\t}\n}\n", {'"ab"'}),
        ("func TestA(t *testing.T) {\n\twant := []int{4, 5}\n\tif !reflect.DeepEqual(F(1), want) {\n\t\tt.Fail()\n\t}\n}\n", {"4", "5"}),
        (f"func TestA(t *testing.T) {{\n\tcheck(t, F(1), 7)\n}}\n{CHECK}", {"7"}),
        ("const most = 9\nfunc TestA(t *testing.T) {\n\tif F(1) != most {\n\t\tt.Fatal()\n\t}\n}\n", {"9"}),
        ("func TestA(t *testing.T) {\n\tassert.Equal(t, 4, F(1))\n\trequire.Len(t, F(2), 3)\n}\n", {"4", "3"}),
        ("func TestA(t *testing.T) {\n\tis := assert.New(t)\n\tis.Equal(\"x\", F(1))\n}\n", {'"x"'}),
        ("func TestA(t *testing.T) {\n\tc.Assert(F(1), qt.Equals, 6)\n}\n", {"6"}),
        ("func TestA(t *testing.T) {\n\tg.Expect(F(1)).To(HaveLen(2))\n}\n", {"2"}),
    ],
)  # fmt: skip
def test_an_expected_literal_is_changed_and_no_input(body: str, values: set[str]) -> None:
    assert {text for text, kind in contradicted(body) if kind == "value"} == values


@pytest.mark.parametrize("rows", ["{1, 4}, {2, 5}", "{in: 1, want: 4}, {want: 5, in: 2}"])
@pytest.mark.parametrize("declared", ["type row struct {\n\tin int\n\twant int\n}\n", ""])
def test_the_compared_column_of_a_table_is_changed(rows: str, declared: str) -> None:
    row = "row" if declared else "struct{ in, want int }"
    body = (
        f"{declared}func TestA(t *testing.T) {{\n\tfor _, tt := range []{row}{{{rows}}} {{\n"
        "\t\tif got := F(tt.in); got != tt.want {\n\t\t\tt.Error(got)\n\t\t}\n\t}\n}\n"
    )
    assert {text for text, kind in contradicted(body) if kind == "value"} == {"4", "5"}


def test_a_condition_is_negated_and_an_error_that_the_message_reads_is_not() -> None:
    body = (
        "func TestA(t *testing.T) {\n\terr := F(1)\n\tif err != nil {\n\t\tt.Fatal(err.Error())\n\t}\n"
        "\tif !Ok(1) || Bad(2) {\n\t\tt.Fatal()\n\t}\n\tassert.True(t, Ok(3))\n}\n"
    )
    assert {text for text, kind in contradicted(body) if kind == "opposite"} == {"!Ok(1) || Bad(2)", "Ok(3)"}


def test_the_output_of_an_example_is_changed() -> None:
    body = "func ExampleA() {\n\t// first\n\tfmt.Println(F(1))\n\t// Output:\n\t// 34\n}\n"
    assert contradicted(body, "ExampleA") == {(" 34", "value")}


def test_a_helper_contradicts_each_test_that_calls_it() -> None:
    body = (
        "func TestA(t *testing.T) { check(t) }\nfunc TestB(t *testing.T) { check(t) }\nfunc TestC(t *testing.T) {}\n"
        "func check(t *testing.T) {\n\tif F() != 3 {\n\t\tt.Fatal()\n\t}\n}\n"
    )
    for one in LANGUAGE.candidates(f"{HEAD}{body}".encode(), random.Random(1)):
        assert one.tests == ("TestA", "TestB")


@pytest.mark.parametrize(
    "source", [b"", b"\xff\xfe", b"package calc\nfunc TestA(t *testing.T) {", b"not go at all {{{"]
)
def test_a_file_that_does_not_parse_breaks_nothing(source: bytes) -> None:
    LANGUAGE.tests(source)
    LANGUAGE.candidates(source, random.Random(1))


def test_a_large_file_is_read_in_linear_time() -> None:
    rows = "".join(f"\t{{{n}, {n + 1}}},\n" for n in range(3000))
    body = (
        f"var rows = []struct{{ in, want int }}{{\n{rows}}}\n"
        "func TestA(t *testing.T) {\n\tfor _, tt := range rows {\n\t\tif F(tt.in) != tt.want {\n\t\t\tt.Error()\n\t\t}\n\t}\n}\n"
    )
    assert LANGUAGE.candidates(f"{HEAD}{body}".encode(), random.Random(1))


def test_a_value_that_the_code_gets_as_well_is_not_changed() -> None:
    used = (
        "func TestA(t *testing.T) {\n\twant := 5\n\tif got := F(want); got != want {\n\t\tt.Error()\n\t}\n}\n"
    )
    assert {kind for _, kind in contradicted(used)} == {"opposite"}
    names = (
        'func TestA(t *testing.T) {\n\tnames := []string{"a", "b"}\n\tfor _, name := range names {\n\t\tAdd(name)\n\t}\n'
        "\tif Get(0) != names[0] {\n\t\tt.Error()\n\t}\n}\n"
    )
    assert {kind for _, kind in contradicted(names)} == {"opposite"}
    table = (
        'func TestA(t *testing.T) {\n\tcases := map[string]int{"a": 4}\n\tfor in, want := range cases {\n'
        "\t\tif F(in) != want {\n\t\t\tt.Error()\n\t\t}\n\t}\n}\n"
    )
    assert {text for text, kind in contradicted(table) if kind == "value"} == {"4"}


def test_a_value_that_must_not_be_there_is_not_changed() -> None:
    body = (
        'func TestA(t *testing.T) {\n\tif strings.Contains(F(1), "x") || F(2) == 3 {\n\t\tt.Error()\n\t}\n'
        '\tif !strings.Contains(F(1), "y") || F(2) != 4 {\n\t\tt.Error()\n\t}\n}\n'
    )
    assert {text for text, kind in contradicted(body) if kind == "value"} == {'"y"', "4"}


def test_an_error_whose_text_the_message_reads_is_not_negated() -> None:
    body = "func TestA(t *testing.T) {\n\tif x := F(); x != nil {\n\t\tt.Error(x.Name)\n\t}\n}\n"
    assert contradicted(body) == set()
    assert contradicted(body.replace("x.Name", "x")) == {("x != nil", "opposite")}
