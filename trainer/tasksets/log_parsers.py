"""Names of the swebench package's log parsers (5.x), and the repositories whose logs list failures alone.

The trainer does not need the package, which workers have; a test compares the names with it.
"""

import difflib

from trainer.tasksets.fields import Fields

# fmt: off
_FORMATS = (
    # python
    "astroid", "astropy", "django", "flask", "marshmallow", "matplotlib", "pvlib", "pydicom", "pylint",
    "pytest", "pytest_options", "pytest_v2", "pyvista", "requests", "scikit", "seaborn", "sphinx",
    "sqlfluff", "sympy", "xarray",
    # javascript
    "bpmn_js", "calypso", "carbon", "chart_js", "eslint", "grommet", "highlightjs", "immutable_js", "jest",
    "jest_json", "karma", "lighthouse", "marked", "next", "openlayers", "p5js", "prismjs", "quarto_cli",
    "react_pdf", "tap", "vitest",
    # c
    "doctest", "googletest", "jq", "micropython_test", "redis",
    # go, java, php, ruby, rust
    "ant", "cargo", "cucumber", "gotest", "gradle_custom", "jekyll", "maven", "minitest", "phpunit",
    "rspec_transformed_json", "ruby_unit",
)
# fmt: on
NAMES = frozenset(f"parse_log_{name}" for name in _FORMATS)
# A test that the log of such a repository does not name has passed (eval_type fail_only).
FAIL_ONLY_REPOS = frozenset(
    {
        "bpmn-io/bpmn-js",
        "chartjs/Chart.js",
        "eslint/eslint",
        "markedjs/marked",
        "openlayers/openlayers",
        "processing/p5.js",
    }
)


def checked(fields: Fields, name: str) -> str:
    """`name`, or ValueError if swebench has no parser of it."""
    if name in NAMES:
        return name
    near = difflib.get_close_matches(name, NAMES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(NAMES))}"
    raise fields.refusal("log_parser", f"swebench has no {name!r}; {hint}")
