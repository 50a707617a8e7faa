"""Rust: the names of tests, the outcomes in the logs of cargo, and contradictions of what assertions expect."""

import random
import re

import pytest

from workers.grading.controls.writing import Candidate
from workers.grading.languages.language import FAILED, PASSED, SKIPPED, Form
from workers.grading.languages.rust import LANGUAGE

TESTS = """
pub fn add(a: i32, b: i32) -> i32 { a + b }

#[cfg(test)]
mod tests {
    use super::*;

    fn helper() {}

    #[test]
    fn adds() {}

    mod deeper {
        #[tokio::test(flavor = "multi_thread")]
        #[ignore]
        // A comment.
        async fn later() {}
    }

    #[rstest]
    #[case(1, 2)]
    fn doubles(#[case] n: i32, #[case] want: i32) {}

    #[test_case(1; "one")]
    fn named(n: i32) {}
}

#[wasm_bindgen_test]
fn outside() {}
"""


def test_tests_are_named_by_the_modules_of_their_file() -> None:
    found = {test.name: test.keys for test in LANGUAGE.tests(TESTS.encode())}
    assert found == {
        "tests::adds": ("tests::adds", "adds"),
        "tests::deeper::later": ("tests::deeper::later", "later"),
        "tests::doubles": ("tests::doubles", "doubles"),
        "tests::named": ("tests::named", "named"),
        "outside": ("outside",),
    }


def test_the_cases_of_a_parametrised_test_belong_to_it() -> None:
    patterns = {test.name: test.pattern for test in LANGUAGE.tests(TESTS.encode())}
    assert patterns["tests::adds"] is None
    pattern = patterns["tests::doubles"]
    assert pattern is not None
    forms = ("doubles", "tests::doubles", "doubles::case_1", "tests::doubles::case_1_of_two")
    assert all(map(pattern.fullmatch, forms))
    assert not any(map(pattern.fullmatch, ("doubles_more", "tests::adds", "other::doubles")))


@pytest.mark.parametrize("source", [b"\xff#[test] fn a() {}", b"#[test] fn a( { assert", b"", b"{" * 5000])
def test_a_source_that_is_no_rust_has_no_tests(source: bytes) -> None:
    assert LANGUAGE.tests(source) == []
    assert LANGUAGE.candidates(source, random.Random(0)) == []


@pytest.mark.parametrize(
    ("path", "may"),
    [("src/lib.rs", True), ("tests/it.rs", True), ("target/debug/a.rs", False), ("src/a.py", False)],
)
def test_tests_may_be_in_any_source_that_is_not_built(path: str, may: bool) -> None:
    assert LANGUAGE.may_hold_tests(path) is may


@pytest.mark.parametrize(
    ("name", "forms"),
    [
        ("adds", [("adds", "")]),
        (
            "a::b::tests::adds",
            [("a::b::tests::adds", ""), ("b::tests::adds", "a"), ("tests::adds", "a/b"), ("adds", "a/b/tests")],
        ),
        ("unittests src/lib.rs (demo) > a::adds", [("a::adds", "src/lib"), ("adds", "src/a")]),
        ("tests/it.rs > adds", [("adds", "tests/it")]),
        ("tests/it.rs: m::adds", [("m::adds", "tests/it"), ("adds", "tests/it/m"), ("adds", "tests/m")]),
        ("demo tests::adds", [("tests::adds", ""), ("adds", "tests")]),
        ("demo::it adds", [("adds", "tests/it")]),
        ("demo::bin/tool adds", [("adds", "src/bin/tool")]),
        ("src/lib.rs - add (line 3)", []),
        ("Doc-tests demo > src/lib.rs - add", []),
    ],
)  # fmt: skip
def test_the_modules_of_a_name_are_modules_of_the_file_or_its_path(
    name: str, forms: list[tuple[str, str]]
) -> None:
    assert LANGUAGE.forms(name) == [Form(*one) for one in forms]


LOG = """\
   Compiling demo v0.1.0 (/workspace)
     Running unittests src/lib.rs (target/debug/deps/demo-8348ca7a80742723)

running 4 tests
test a::tests::adds ... ok
test tests::ignored ... ignored, slow
test tests::panics - should panic ... ok
test tests::errors ... FAILED

failures:

---- tests::errors stdout ----

thread 'tests::errors' panicked at src/lib.rs:19:5:
assertion `left == right` failed
  left: 3
 right: 4


failures:
    tests::errors

test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.37s

     Running tests/it.rs (target/debug/deps/it-a69063779ff8c574)

running 2 tests
test adds ... ok
test once ... ok

test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s

     Running tests/other.rs (target/debug/deps/other-5ef8d72c3fe15773)

running 1 test
test adds ... FAILED

   Doc-tests demo

running 1 test
test src/lib.rs - add (line 8) ... ok

test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.40s
"""


def test_a_name_is_given_with_its_program_and_an_example_without_its_line() -> None:
    expected = {
        "unittests src/lib.rs (demo) > a::tests::adds": PASSED,
        "unittests src/lib.rs (demo) > tests::ignored": SKIPPED,
        "unittests src/lib.rs (demo) > tests::panics": PASSED,
        "unittests src/lib.rs (demo) > tests::errors": FAILED,
        "tests/it.rs > adds": PASSED,
        "tests/it.rs > once": PASSED,
        "tests/other.rs > adds": FAILED,
        "Doc-tests demo > src/lib.rs - add": PASSED,
    }
    assert LANGUAGE.outcomes(LOG) == expected
    assert LANGUAGE.outcomes(LOG.replace("\n", "\r\n")) == expected
    coloured = LOG.replace("... ok", "... \x1b[32mok\x1b[0m").replace(
        "   Doc-tests", "\x1b[1m   Doc-tests\x1b[0m"
    )
    assert LANGUAGE.outcomes(coloured) == expected


def test_programs_of_another_place_in_the_log_name_no_test() -> None:
    heads = [line for line in LOG.splitlines() if "Running" in line or "Doc-tests" in line]
    others = [line for line in LOG.splitlines() if line not in heads]
    found = LANGUAGE.outcomes("\n".join((*heads, "warning: unused", *others)))
    assert found["adds"] == FAILED
    assert not any(">" in name for name in found)


def test_an_outcome_may_follow_what_the_test_printed() -> None:
    log = """
running 6 tests
test a ... printed
and more
ok
test b ... no line end ok
test c ...
thread 'c' (24) panicked at src/lib.rs:43:5:
FAILED
test d ... ok, said the test
test e ... ok
test f ... not even a line endFAILED

failures:

failures:
    c
    d
    never_announced

test result: FAILED. 3 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.26s
""".replace("test c ...\n", "test c ... \n")
    expected = {"a": PASSED, "b": PASSED, "c": FAILED, "d": FAILED, "e": PASSED, "f": FAILED}
    assert LANGUAGE.outcomes(log) == expected


def test_a_test_that_failed_anywhere_has_failed() -> None:
    assert LANGUAGE.outcomes("test a ... ok\ntest a ... FAILED\ntest a ... ok\n") == {"a": FAILED}


def test_the_lines_of_nextest_name_the_crate() -> None:
    log = """
    Starting 6 tests across 2 binaries
        PASS [   0.005s] demo tests::adds
        PASS [   0.005s] (2/6) demo::it adds
        FAIL [   0.012s] (3/6) demo::it fails
  stdout ───

    running 1 test
test fails ... FAILED

    failures:
        fails
     SIGABRT [   0.003s] demo aborts
     TIMEOUT [  60.000s] demo waits
        SLOW [> 60.000s] demo sleeps
  TRY 1 FAIL [   0.003s] demo flaky
  TRY 2 PASS [   0.003s] demo flaky
        SKIP [         ] demo skipped
------------
     Summary [   0.100s] 6 tests run: 2 passed, 4 failed, 1 skipped
"""
    assert LANGUAGE.outcomes(log) == {
        "demo tests::adds": PASSED,
        "demo::it adds": PASSED,
        "demo::it fails": FAILED,
        "demo aborts": FAILED,
        "demo waits": FAILED,
        "demo flaky": FAILED,
        "demo skipped": SKIPPED,
    }


def test_a_crate_that_does_not_compile_has_no_outcomes() -> None:
    log = "error[E0425]: cannot find function `ad` in this scope\n  --> src/lib.rs:83:20\n   |\n"
    assert (
        LANGUAGE.outcomes(f"{log}error: could not compile `demo` (lib test) due to 1 previous error\n") == {}
    )


@pytest.mark.parametrize(
    "part",
    [
        *("test a ... ", "test a", "running 1 test\n", "    ", "     Running (", "PASS [", "    a\n", "\x1b["),
        *("test a - (line 1", "failures:\n", "ok\n", "test a ... ok\n", "     Running a.rs (b)\n", "\n"),
    ],
)  # fmt: skip
def test_a_hostile_log_is_read_in_linear_time(part: str) -> None:
    # Quadratic time for a megabyte would be stopped by the limit of the test.
    assert len(LANGUAGE.outcomes(part * (1_000_000 // len(part)))) <= 1


def of_test(body: str, around: str = "", attributes: str = "") -> tuple[str, list[Candidate]]:
    source = f"{around}\n#[test]\n{attributes}fn t() {{\n{body}\n}}\n"
    return source, LANGUAGE.candidates(source.encode(), random.Random(1))


def changes(source: str, candidates: list[Candidate]) -> list[tuple[str, str, str]]:
    """The kind, the text and its replacement for each edit, in the order of the source."""
    content = source.encode()
    edits = sorted((edit.start, edit.end, edit.becomes, one.kind) for one in candidates for edit in one.edits)
    return [(kind, content[start:end].decode(), becomes) for start, end, becomes, kind in edits]


def changed(body: str, around: str = "") -> list[str]:
    """The texts that candidates change, in the order of the source."""
    return [was for _, was, _ in changes(*of_test(body, around))]


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ("assert_eq!(add(2, 2), 4);", ["4"]),
        ('assert_eq!(3, f("x"), "message {}", 5);', ["3"]),
        ("assert_eq!(f(1,\n 2), // not, this\n 5,\n);", ["5"]),
        ('assert_eq!(f(1), Some("x"));', ['"x"']),
        ("assert_eq!(f(1), Ok((3, true)));", ["3", "true"]),
        ("assert_eq!(f(1), vec![1u8, 0xff]);", ["1u8", "0xff"]),
        ("assert_eq!(f(&[7]), [[0; 4], [1; 4]]);", ["0", "1"]),
        ('assert_eq!(f(1), Point { x: -3, name: "n".to_string(), other: g(4) });', ["3", '"n"']),
        ('assert_eq!(f(1), Shape::At(String::from("s"), double(3)));', ['"s"']),
        ("assert_eq!(f(1), Duration::from_secs(5));", ["5"]),
        ("pretty_assertions::assert_eq!(f(1), 'c');", ["'c'"]),
        ("debug_assert_eq!(f(1), 1.5);", ["1.5"]),
        ('assert_eq!(f(1), &b"ab"[..]);', ['b"ab"']),
        ("assert_eq!(f(1), r#\"ab\"#);", ['r#"ab"#']),
        ('assert_eq!(f(1), format!("a{}", x));', ['"a{}"']),
        ("assert_eq!(f(1), 300 as u64);", ["300"]),
        ('assert_eq!("1", Shape::At(2).to_string());', ['"1"']),
        ('assert_eq!(f(1), ["a".into(), "b".to_string()].to_vec());', ['"a"', '"b"']),
        ("assert!(f(1) == 2 && g(3) == 4, \"message {}\", 5);", ["2", "4"]),
        ("assert!(!(f(1) != 2));", ["2"]),
        ('assert!(f(1).starts_with("bad"));', ['"bad"']),
        ("assert!(matches!(f(1), Shape::At { x: 3 } if 4 > 1));", ["3"]),
        ("assert_matches!(f(1), Some(3));", ["3"]),
        ("if f(1) != 2 || g(3) != 4 { panic!(\"no {}\", 5); }", ["2", "4"]),
        ("if f(1) == 2 { g(3); } else { unreachable!() }", ["2"]),
        ("match f(1) { Ok(3) => {} Ok(true) => {} Ok(n) => panic!(\"{}\", 4), Err(_) => unreachable!() }", ["3"]),
        ("let Some(3) = f(1) else { panic!() };", ["3"]),
        ("if let Some(3) = f(1) { g(2) } else { panic!() }", ["3"]),
        ('insta::assert_snapshot!(f(1), @"shot");', ['"shot"']),
        ('assert_yaml_snapshot!(f(1), @r###"a: 1"###);', ['r###"a: 1"###']),
        ('insta::assert_snapshot!("name", f(1));', []),
        ("assert_relative_eq!(f(1), 1.25, epsilon = 0.1);", ["1.25"]),
        ('assert_to_string(version, "1.0");', ['"1.0"']),
        ('assert_match_all(version, &["1.0"]);', []),
        ('assert_parses("1.0", "2.0");', []),
        ('assert_eq!(f(1), json!({"a": [1]}));', ['"a"', "1"]),
    ],
)  # fmt: skip
def test_the_expected_value_of_an_assertion_is_changed_and_no_input(body: str, texts: list[str]) -> None:
    source, found = of_test(body)
    assert sorted(was for _, was, _ in changes(source, found)) == sorted(texts)
    assert all(one.kind == "value" and one.tests == ("t",) for one in found)


@pytest.mark.parametrize(
    ("body", "around", "texts"),
    [
        ('let want = vec!["a".to_string()];\nassert_eq!(f(1), want);', "", ['"a"']),
        ("let want = 3;\nlet want = Some(want);\nassert_eq!(f(1), want);", "", ["3"]),
        ("assert_eq!(f(1), WANT);", "const WANT: u8 = 3;", ["3"]),
        ("assert_eq!(f(1), WANT);", "static WANT: &str = \"w\";", ['"w"']),
        ("for (n, want) in [(1, 2), (3, 4)] { assert_eq!(f(n), want); }", "", ["2", "4"]),
        ("let rows = vec![(1, 2)];\nfor &(n, want) in &rows { assert_eq!(f(n), want, \"{want}\"); }", "", ["2"]),
        ("for (i, (n, want)) in [(1, 2)].iter().enumerate() { assert_eq!(f(*n), *want, \"{}\", i); }", "", ["2"]),
        ("for (n, want) in [1].iter().zip([2]) { assert_eq!(f(*n), want); }", "", ["2"]),
        ("for row in ROWS { assert_eq!(f(row.n), row.want); }",
         "struct Row { n: u8, want: u8 }\nconst ROWS: [Row; 1] = [Row { n: 1, want: 2 }];", ["2"]),
        ("for Row { n, want: w } in [Row { n: 1, want: 2 }] { assert_eq!(f(n), w); }", "", ["2"]),
        ("for row in [(1, 2)] { assert_eq!(f(row.0), row.1); }", "", ["2"]),
        ("let check = |n: u8, want: u8| assert_eq!(f(n), want);\ncheck(1, 2);", "", ["2"]),
        ("check(1, 2);", "fn check(n: u8, want: u8) { assert_eq!(f(n), Some(want)); }", ["2"]),
        ("check!(1, 2);", "macro_rules! check {\n($n:expr, $w:expr $(,)?) => { assert_eq!(f($n), $w); };\n}", ["2"]),
    ],
)  # fmt: skip
def test_an_expected_value_is_changed_where_it_is_written(body: str, around: str, texts: list[str]) -> None:
    source, found = of_test(body, around)
    assert [was for _, was, _ in changes(source, found)] == texts
    assert [(one.kind, one.tests) for one in found] == [("value", ("t",))] * len(texts)


@pytest.mark.parametrize(
    ("body", "around"),
    [
        ('let text = "a";\nassert_eq!(decode(encode(text)), text);', ""),
        ('assert_eq!(decode(encode(TEXT)), TEXT);', 'const TEXT: &str = "a";'),
        ("for n in [1, 2] { assert_eq!(f(n), n); }", ""),
        ("check(1);", "fn check(n: u8) { assert_eq!(f(n), n); }"),
        ("for row in [Row { n: 1 }] { assert_eq!(f(row.n), row.n); }", ""),
        ("let mut want = 1;\nwant += g();\nassert_eq!(f(1), want);", ""),
        ("let shape = Shape::At(2);\nassert_eq!(f(1), shape.to_string());", ""),
        ("if let Some(want) = f(2) { assert_eq!(f(1), want); }", "const want: u8 = 3;"),
    ],
)  # fmt: skip
def test_a_value_that_the_code_under_test_may_get_is_left_as_it_is(body: str, around: str) -> None:
    source, found = of_test(body, around)
    assert [one.kind for one in found] == ["opposite"]
    assert " == &(" in changes(source, found)[0][2]


@pytest.mark.parametrize(
    ("body", "was", "becomes"),
    [
        ("assert!(f(1).is_empty());", "f(1).is_empty()", "!(f(1).is_empty())"),
        ("assert!(f(1) < 5, \"why {}\", 2);", "f(1) < 5", "!(f(1) < 5)"),
        ("assert_eq!(f(1), g(2));", "f(1), g(2)", "(&(f(1)) == &(g(2))), false"),
        ("assert_eq!(\nf(1), // one\ng(2),\n);", "f(1), // one\ng(2)", "(&(f(1)) == &(// one\ng(2))), false"),
        ("assert_ne!(f(1), 3);", "f(1), 3", "(&(f(1)) == &(3)), false"),
        ("if f(1) > 2 { panic!(); }", "f(1) > 2", "!(f(1) > 2)"),
        ("let e = f(1).unwrap_err();", "unwrap_err", "err().filter(|_| false).unwrap"),
        ('f(1).expect_err("none");', "expect_err", "err().filter(|_| false).expect"),
    ],
)  # fmt: skip
def test_an_assertion_without_a_written_value_is_reversed(body: str, was: str, becomes: str) -> None:
    assert changes(*of_test(body)) == [("opposite", was, becomes)]


def test_a_panic_is_no_longer_expected_or_with_another_message() -> None:
    source, found = of_test("f(1);", attributes='#[should_panic(\n    expected = "boom")]\n')
    (_, whole, nothing), (kind, text, other) = changes(source, found)
    assert (whole, nothing) == ('#[should_panic(\n    expected = "boom")]', "\n")
    assert (kind, text) == ("value", '"boom"')
    assert re.fullmatch(r'"\w{4}"', other)


def test_the_case_of_a_parametrised_test_gets_another_expected_value() -> None:
    source = (
        "#[rstest]\n#[case(1, 2)]\n#[case::named(3, -4)]\n"
        "fn r(fixture: u8, #[case] n: i8, #[case] want: i8) { assert_eq!(f(n), want); }\n"
        '#[test_case(5, 6 ; "name")]\n#[test_case(7, 8)]\nfn c(n: u8, want: u8) { assert_eq!(f(n), want); }\n'
        '#[test_case(9 => 10 ; "ten")]\n#[test_case(11 => 12)]\nfn d(n: u8) -> u8 { f(n) }\n'
    )
    found = LANGUAGE.candidates(source.encode(), random.Random(1))
    values = [one for one in found if one.kind == "value"]
    assert [was for _, was, _ in changes(source, values)] == ["2", "4", "6", "10"]
    assert {one.tests for one in values} == {("r",), ("c",), ("d",)}


@pytest.mark.parametrize(
    ("was", "pattern"),
    [
        ("255", "254"), ("255u8", "254u8"), ("0", "1"), ("-128i8", "-127i8"), ("-0x80", "-0x7f"),
        ("0b10", "0b11"), ("0o17_u8", "0o10_u8"), ("0xff", r"0xf[0-9a-e]"), ("1_000u64", "999u64|1001u64"),
        ("2.50f32", r"2\.5[1-9]f32"), ("true", "false"), ("b'x'", "b'[a-wyz]'"), (r"'\n'", "'[a-z]'"),
        ('""', '"[a-z]"'), (r'"\n"', r'"\\n[a-z]"'), (r'"\u{41}b"', r'"\\u\{41\}[ac-z]"'), ("'ä'", "'[a-z]'"),
    ],
)  # fmt: skip
def test_another_literal_has_the_same_type(was: str, pattern: str) -> None:
    text = f"assert_eq!(f(1), {was});"
    source, (found,) = of_test(text)
    (edit,) = found.edits
    content = source.encode()
    edited = (content[: edit.start] + edit.becomes.encode() + content[edit.end :]).decode()
    assert re.search(rf"f\(1\), (?:{pattern})\);", edited)


def test_a_byte_string_without_letters_keeps_its_length() -> None:
    (change,) = changes(*of_test(r'assert_eq!(f(1), b"\x00");'))
    assert change[0] == "opposite"


def test_assertions_of_helpers_belong_to_all_tests_that_reach_them() -> None:
    source = """
pub fn code(n: u8) -> u8 { assert!(n < 100); n }
#[cfg(test)]
mod tests {
    fn deep(n: u8) { assert!(super::code(n).is_power_of_two()); }
    fn helper(n: u8) { deep(n) }
    #[test]
    fn a() { helper(1) }
    #[test]
    fn b() { deep(2) }
    #[test]
    fn c() { super::code(3); }
}
"""
    (found,) = LANGUAGE.candidates(source.encode(), random.Random(1))
    assert sorted(found.tests) == ["tests::a", "tests::b"]
    ((start, end),) = found.checked
    assert source.encode()[start:end] == b"assert!(super::code(n).is_power_of_two())"


def test_the_code_under_test_in_the_same_file_is_left_as_it_is() -> None:
    source = '#[cfg(feature = "test")]\nfn f(n: u8) { assert_eq!(n, 3); }\n#[cfg(test)]\nmod tests {\n#[test]\nfn t() { super::f(3); }\n}\n'
    assert LANGUAGE.candidates(source.encode(), random.Random(1)) == []


def test_a_test_has_a_bounded_number_of_contradictions_values_first() -> None:
    body = "".join(f"assert_eq!(f({n}), {n});\nassert!(g({n}));\n" for n in range(50))
    _, found = of_test(body)
    assert [one.kind for one in found] == ["value"] * 5 + ["opposite"] * 3


def test_edits_keep_the_number_of_lines_and_the_syntax() -> None:
    source, found = of_test(
        'assert_eq!(\n    f(1),\n    g("a\nb"), "why\n{}", 2\n);\nassert_eq!(f(2), "c\nd");'
    )
    content = source.encode()
    for one in found:
        (edit,) = one.edits
        edited = content[: edit.start] + edit.becomes.encode() + content[edit.end :]
        assert edited.count(b"\n") == content.count(b"\n")
        assert [test.name for test in LANGUAGE.tests(edited)] == ["t"]
    assert [one.kind for one in found] == ["value", "opposite"]


def test_a_macro_that_is_no_function_leaves_the_other_assertions() -> None:
    around = "macro_rules! odd {\n($($x:tt)*) => { $($x)* };\n($a:expr; $b:ty) => { 3 };\n}"
    body = "odd!(struct A;);\nselect! { x = f(1) => {} }\nassert_eq!(f(1), 4);\nodd![1; 2];"
    assert changed(body, around) == ["4"]
