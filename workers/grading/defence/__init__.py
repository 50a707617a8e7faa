"""The defence of a verdict against patches that try to manipulate it. `grade.py` and `container.py` use only these modules:

- `before.py`: before the tests, the patch is applied without the files that it must not contain, and the files that govern the runner, the
scripts that are run and the files of the tests are restored; - `after.py`: after the tests, the observations of the witness in their
processes may refute log and exit status; - `control.py`: in addition to the true run there is another one, in which an expectation of one
test is wrong and that test must fail.
"""
