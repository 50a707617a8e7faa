"""SWE-Gym, and its Subset with a column `eval_script`.

A fork of swebench that is on no package index makes the scripts of the full dataset, so that column has to be added to its rows first. The
script decides how it is judged: by its log if it marks the tests' output, otherwise by its exit status, and the script is then first
changed to return that of the tests.
"""

from pipeline.task import ExitCode, SwebenchLog, Task
from pipeline.taskfile import Gold
from workers.tasksets.eval_scripts import with_status_of_tests
from workers.tasksets.importing import Importer, named_image
from workers.tasksets.patches import diff_in, paths_of
from workers.tasksets.rows import Fields
from workers.tasksets.swe_bench import END_MARK, ENV, START_MARK, log_verdict, row_of, workdir_of

PARSERS = {  # swebench's own, for the repositories that the fork adds
    "bokeh/bokeh": "parse_log_pytest",
    "conan-io/conan": "parse_log_pytest",
    "dask/dask": "parse_log_pytest",
    "facebookresearch/hydra": "parse_log_pytest",
    "getmoto/moto": "parse_log_pytest",
    "iterative/dvc": "parse_log_pytest",
    "modin-project/modin": "parse_log_pytest",
    "pandas-dev/pandas": "parse_log_pytest",
    "project-monai/monai": "parse_log_pytest",
    "pydantic/pydantic": "parse_log_pytest_v2",
    "python/mypy": "parse_log_pytest",
}
NO_SCRIPT = (
    "absent: it takes SWE-Gym's fork of the harness (SWE-Gym/SWE-Bench-Fork), which no package index has; in an"
    " environment with the fork, add the column as swebench.harness.test_spec.make_test_spec(row).eval_script"
)


def task_of(fields: Fields) -> tuple[Task, Gold]:
    """The task and its solution. Raises ValueError naming file, row and field."""
    instance_id = fields.text("instance_id")
    if not fields.optional_text("eval_script").strip():
        raise fields.refusal("eval_script", NO_SCRIPT)
    task = Task(
        id=f"swe-gym:{instance_id}",
        repo=fields.text("repo"),
        base_commit=fields.text("base_commit"),
        image=named_image(fields) or _image(instance_id),
        workdir=workdir_of(fields),
        problem=fields.text("problem_statement"),
        verdict=_verdict(fields),
        env=ENV,
        builder_commits=True,
    )
    return task, Gold(id=task.id, patch=diff_in(fields, "patch"), test_patch=diff_in(fields, "test_patch"))


IMPORTER = Importer(
    help="rows of SWE-Gym or its Subset, with a column eval_script", task_of=task_of, row_of=row_of
)


def _verdict(fields: Fields) -> SwebenchLog | ExitCode:
    script = fields.script("eval_script")
    if START_MARK in script and END_MARK in script:
        repo = fields.text("repo")
        parser = fields.optional_text("log_parser") or PARSERS.get(repo.lower())
        if parser is None:
            raise fields.refusal("repo", f"no log parser is known for {repo!r}; add a column log_parser")
        return log_verdict(fields, parser)
    try:
        script = with_status_of_tests(script)
    except ValueError as error:
        raise fields.refusal("eval_script", str(error)) from error
    test_patch = diff_in(fields, "test_patch")
    brings_tests = "git apply" in script or "patch -p1" in script
    return ExitCode(
        eval_script=script,
        test_patch=b"" if brings_tests else test_patch.encode(),
        protected_paths=paths_of(test_patch),
    )


def _image(instance_id: str) -> str:
    """The published image's name, by rule."""
    return f"docker.io/xingyaoww/sweb.eval.x86_64.{instance_id.replace('__', '_s_')}:latest".lower()
