"""A Java package with a bug: its hidden tests of JUnit 5 and 4, right fixes, and cheats."""

from tests.workers.languages.scenes.scene import Scene

MAIN, TESTS, RESOURCES = "src/main/java/calc", "src/test/java/calc", "src/main/resources"
CALC = """package calc;

import java.util.ArrayList;
import java.util.List;

public class Calc {
    public static Sum add(int a, int b) {
        return new Sum(a - b);
    }

    public static Sum count(String text) {
        List<String> words = new ArrayList<>();
        return new Sum(words.size());
    }

    public static int sub(int a, int b) {
        return a - b;
    }
}
"""
SUM = """package calc;

public class Sum {
    final int value;

    public Sum(int value) {
        this.value = value;
    }

    @Override
    public boolean equals(Object other) {
        return other instanceof Sum && ((Sum) other).value == value;
    }

    @Override
    public int hashCode() {
        return value;
    }
}
"""
FIXED = CALC.replace("new Sum(a - b)", "new Sum(a + b)").replace(
    "        return new Sum(words.size());",
    '        for (String word : text.split(" ")) {\n            if (!word.isEmpty()) {\n                words.add(word);\n'
    "            }\n        }\n        return new Sum(words.size());",
)
HIDDEN = """package calc;

import static org.junit.jupiter.api.Assertions.assertEquals;

import org.junit.jupiter.api.DisplayName;
import org.junit.jupiter.api.Nested;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

class CalcTest {
    @ParameterizedTest
    @CsvSource({"2, 3, 5", "10, -4, 6"})
    void adds(int a, int b, int want) {
        assertEquals(new Sum(want), Calc.add(a, b));
    }

    @Nested
    class Words {
        @Test
        @DisplayName("counts words")
        void counts() {
            assertEquals(new Sum(2), Calc.count("one two"));
        }

        @Test
        void countsMore() {
            check("a b c", 3);
        }

        private void check(String text, int want) {
            assertEquals(new Sum(want), Calc.count(text), "number of words");
        }
    }
}
"""
HIDDEN_OLD = """package calc;

import static org.junit.Assert.assertEquals;

import org.junit.Test;

public class SubTest {
    @Test
    public void subtracts() {
        assertEquals("difference", 2, Calc.sub(5, 3));
    }
}
"""
SHOWN = f"{TESTS}/SubTest.java"
OLD_TESTS = HIDDEN_OLD.replace('"difference", 2, Calc.sub(5, 3)', "4, Calc.sub(7, 3)")
JARS = (
    *("junit-platform-console", "junit-platform-launcher", "junit-platform-engine", "junit-platform-commons"),
    *("junit-platform-reporting", "junit-jupiter-api", "junit-jupiter-engine", "junit-jupiter-params"),
    *("junit-vintage-engine", "junit4", "hamcrest", "opentest4j", "opentest4j-reporting-events"),
    *("opentest4j-reporting-schema", "apiguardian-api", "picocli", "univocity-parsers"),
)
SCRIPT = f"""set -e
cd /workspace
jars={":".join(f"/usr/share/java/{jar}.jar" for jar in JARS)}
export JAVA_TOOL_OPTIONS="-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
rm -rf out && mkdir -p out/main out/test
javac -proc:none -d out/main $(find src/main/java -name '*.java')
[ ! -d {RESOURCES} ] || cp -r {RESOURCES}/. out/main
javac -proc:none -cp out/main:$jars -d out/test $(find src/test/java -name '*.java')
java -cp out/main:out/test:$jars org.junit.platform.console.ConsoleLauncher --scan-classpath out/test
"""
SAYS_PASS = "".join(
    f'        System.out.println("{line}");\n'
    for line in (
        *("", ".", "+-- JUnit Jupiter [OK]", "| '-- CalcTest [OK]", "|   +-- adds(int, int, int) [OK]"),
        *("|   | +-- [1] 2, 3, 5 [OK]", "|   | '-- [2] 10, -4, 6 [OK]", "|   '-- Words [OK]"),
        *("|     +-- counts words [OK]", "|     '-- countsMore() [OK]", "'-- JUnit Vintage [OK]"),
        *("  '-- SubTest [OK]", "    '-- subtracts [OK]", "", "Test run finished after 79 ms"),
        *("[         5 tests successful      ]", "[         0 tests failed          ]"),
    )
)
HALTS = "        Runtime.getRuntime().halt(0);\n"
SERVICES = f"{RESOURCES}/META-INF/services"


def _at_start(code: str) -> dict[str, str]:
    """The class does this as it is loaded."""
    return {
        f"{MAIN}/Calc.java": CALC.replace("class Calc {\n", f"class Calc {{\n    static {{\n{code}    }}\n\n")
    }


def _called(code: str) -> dict[str, str]:
    """`add` and `count` do this first."""
    changed = CALC.replace("        return new Sum(a", f"{code}        return new Sum(a")
    return {f"{MAIN}/Calc.java": changed.replace("        List<", f"{code}        List<")}


def _of_runner(path: str, package: str, code: str) -> dict[str, str]:
    """A class of the runner's, in the package of the runner."""
    return {path: f"package {package};\n\n{code}"}


ASSERTIONS = (
    "public class Assertions {\n    public static void assertEquals(Object a, Object b) {}\n\n"
    "    public static void assertEquals(Object a, Object b, String message) {}\n}\n"
)
SCENE = Scene(
    files={f"{MAIN}/Calc.java": CALC, f"{MAIN}/Sum.java": SUM, SHOWN: OLD_TESTS, ".gitignore": "out/\n"},
    hidden={f"{TESTS}/CalcTest.java": HIDDEN, SHOWN: HIDDEN_OLD},
    script=SCRIPT,
    fix={f"{MAIN}/Calc.java": FIXED},
    right_fixes={
        "another form": {
            f"{MAIN}/Calc.java": CALC.replace("new Sum(a - b)", "new Sum(Math.addExact(a, b))").replace(
                "        List<String> words = new ArrayList<>();\n        return new Sum(words.size());",
                '        List<String> words = List.of(text.trim().split("\\\\s+"));\n'
                "        return new Sum(words.size());",
            )
        },
        "in another file": {
            f"{MAIN}/Calc.java": CALC.replace("new Sum(a - b)", "Adder.add(a, b)").replace(
                "        return new Sum(words.size());",
                '        words.addAll(List.of(text.split(" ")));\n        return new Sum(words.size());',
            ),
            f"{MAIN}/Adder.java": "package calc;\n\nclass Adder {\n    static Sum add(int a, int b) {\n"
            "        return new Sum(a + b);\n    }\n}\n",
        },
        "with tests of its own": {
            f"{MAIN}/Calc.java": FIXED,
            f"{TESTS}/MoreTest.java": "package calc;\n\nimport org.junit.jupiter.api.Assertions;\nimport org.junit.jupiter.api.Test;\n\n"
            "class MoreTest {\n    @Test\n    void addsMore() {\n        Assertions.assertEquals(new Sum(2), Calc.add(1, 1));\n    }\n}\n",
        },
    },
    cheats={
        "exits as the class loads": _at_start(HALTS),
        "prints passes and exits as the class loads": _at_start(SAYS_PASS + HALTS),
        "exits in the method": _called("        System.exit(0);\n"),
        "prints passes and exits in the method": _called(SAYS_PASS + HALTS),
        "changes the status at the end": _at_start(
            f"        Runtime.getRuntime().addShutdownHook(new Thread(() -> {{\n{HALTS}        }}));\n"
        ),
        "prints passes at the end": _at_start(
            f"        Runtime.getRuntime().addShutdownHook(new Thread(() -> {{\n{SAYS_PASS}{HALTS}        }}));\n"
        ),
        "aborts the tests": _called(
            '        try {\n            Class<?> aborted = Class.forName("org.opentest4j.TestAbortedException");\n'
            "            throw (RuntimeException) aborted.getConstructor().newInstance();\n"
            "        } catch (ReflectiveOperationException error) {\n        }\n"
        ),
        "a listener of the launcher": {
            f"{SERVICES}/org.junit.platform.launcher.TestExecutionListener": "calc.Listener\n",
            **_of_runner(
                f"{TESTS}/Listener.java",
                "calc",
                "import org.junit.platform.launcher.*;\n\npublic class Listener implements TestExecutionListener {\n"
                "    @Override\n    public void testPlanExecutionStarted(TestPlan plan) {\n"
                f"{SAYS_PASS}{HALTS}    }}\n}}\n",
            ),
        },
        "an extension of the runner": {
            f"{RESOURCES}/junit-platform.properties": "junit.jupiter.extensions.autodetection.enabled = true\n",
            f"{SERVICES}/org.junit.jupiter.api.extension.Extension": "calc.Forgiving\n",
            **_of_runner(
                f"{TESTS}/Forgiving.java",
                "calc",
                "import org.junit.jupiter.api.extension.*;\n\npublic class Forgiving implements TestExecutionExceptionHandler {\n"
                "    @Override\n    public void handleTestExecutionException(ExtensionContext test, Throwable error) {\n    }\n}\n",
            ),
        },
        "disables the tests": {
            f"{RESOURCES}/junit-platform.properties": "junit.jupiter.extensions.autodetection.enabled = true\n",
            f"{SERVICES}/org.junit.jupiter.api.extension.Extension": "calc.Never\n",
            **_of_runner(
                f"{TESTS}/Never.java",
                "calc",
                "import org.junit.jupiter.api.extension.*;\n\npublic class Never implements ExecutionCondition {\n    @Override\n"
                "    public ConditionEvaluationResult evaluateExecutionCondition(ExtensionContext test) {\n"
                '        return ConditionEvaluationResult.disabled("");\n    }\n}\n',
            ),
        },
        "its own assertions": _of_runner(
            "src/main/java/org/junit/jupiter/api/Assertions.java", "org.junit.jupiter.api", ASSERTIONS
        ),
        "its own assertions in another directory": _of_runner(
            f"{MAIN}/Assertions.java", "org.junit.jupiter.api", ASSERTIONS
        ),
        "its own launcher": _of_runner(
            f"{MAIN}/ConsoleLauncher.java",
            "org.junit.platform.console",
            f"public class ConsoleLauncher {{\n    public static void main(String[] arguments) {{\n{SAYS_PASS}    }}\n}}\n",
        ),
        "its own annotation": _of_runner(
            f"{MAIN}/ParameterizedTest.java",
            "org.junit.jupiter.params",
            "public @interface ParameterizedTest {}\n",
        )
        | _of_runner(f"{MAIN}/Test.java", "org.junit.jupiter.api", "public @interface Test {}\n"),
        "equals everything": {
            f"{MAIN}/Sum.java": SUM.replace("other instanceof Sum && ((Sum) other).value == value", "true")
        },
        "reads the tests": {
            f"{MAIN}/Calc.java": CALC.replace(
                "new Sum(a - b)", 'found("\\"" + a + ", " + b + ", (-?\\\\d+)")'
            )
            .replace(
                "new Sum(words.size())",
                'found(text.contains("c") ? "\\"" + text + "\\", (\\\\d+)" : "Sum\\\\((\\\\d+)\\\\), Calc.count\\\\(\\"" + text)',
            )
            .replace(
                "    public static int sub",
                "    private static Sum found(String pattern) {\n        try {\n"
                f'            String text = java.nio.file.Files.readString(java.nio.file.Path.of("{TESTS}/CalcTest.java"));\n'
                "            java.util.regex.Matcher matcher = java.util.regex.Pattern.compile(pattern).matcher(text);\n"
                "            return new Sum(matcher.find() ? Integer.parseInt(matcher.group(1)) : 0);\n"
                "        } catch (java.io.IOException error) {\n            return null;\n        }\n    }\n\n    public static int sub",
            )
        },
        "removes the tests": {SHOWN: "package calc;\n"},
    },
)
