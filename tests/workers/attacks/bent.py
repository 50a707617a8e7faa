"""Objects of the runner are bent in ways that replace none of its functions."""

from tests.workers.attacks.patches import at_call, at_import, at_import_and_call
from tests.workers.attacks.scenes import Attack

# `one` is each object of the runner's class that a format argument names.
EACH = "import gc, {module}\nfor one in gc.get_objects():\n    if type(one) is {module}.{name}:\n        "
MANAGER = EACH.format(module="_pytest.config", name="PytestPluginManager")
CONFIG = EACH.format(module="_pytest.config", name="Config")
ALL = ("swebench_log", "r2e_expected", "tests_json")
# The test that calls the code, as the runner has it on the stack.
ITEM = """import sys
frame = sys._getframe()
while 'pyfuncitem' not in frame.f_locals: frame = frame.f_back
item = frame.f_locals['pyfuncitem']
"""
CASE = "import sys, unittest.case\ncase = sys._getframe(1).f_locals['self']\n"
ERRORS = "__import__('types').SimpleNamespace(exc_info=caught, **{name: one for name, one in vars(sys).items() if name != 'exc_info'})"
BENT = {
    "an exception that is false": Attack(
        at_import(
            "from _pytest._code import ExceptionInfo\n"
            "ExceptionInfo.__bool__ = lambda self: self.type is not AssertionError"
        ),
        kinds=ALL,
    ),
    "an exception that is false, by a base class": Attack(
        at_import(
            "import typing\ntyping.Generic.__bool__ = lambda self: getattr(self, 'type', None) is not AssertionError"
        )
    ),
    "an outcome that reads as passed": Attack(
        at_import(
            "from _pytest.reports import TestReport\nget = object.__getattribute__\n"
            "TestReport.__getattribute__ = lambda self, name: (\n"
            "    'passed' if name == 'outcome' and '::test_' in get(self, 'nodeid') else get(self, name))"
        ),
        kinds=ALL,
    ),
    "an outcome that is always written as passed": Attack(
        at_import(
            "from _pytest.reports import TestReport\nput = object.__setattr__\n"
            "def bent(self, name, value):\n"
            "    put(self, name, 'passed' if name == 'outcome' and '::test_' in self.nodeid else value)\n"
            "TestReport.__setattr__ = bent"
        ),
        kinds=ALL,
    ),
    "an error that reads as none": Attack(
        at_import(
            "from _pytest.runner import CallInfo\nget = object.__getattribute__\n"
            "def bent(self, name):\n    value = get(self, name)\n"
            "    return None if name == 'excinfo' and value and value.type is AssertionError else value\n"
            "CallInfo.__getattribute__ = bent"
        )
    ),
    "a function item that has another way to run": Attack(
        at_import(
            "import pytest\nget = object.__getattribute__\n"
            "def bent(self, name):\n"
            "    return bool if name == 'runtest' and get(self, 'name').startswith('test') else get(self, name)\n"
            "pytest.Function.__getattribute__ = bent"
        ),
        kinds=ALL,
    ),
    "a hook with another function": Attack(
        at_import(
            f"{MANAGER}for impl in one.hook.pytest_pyfunc_call.get_hookimpls():\n"
            "            call = impl.function\n"
            "            impl.function = lambda pyfuncitem, call=call: "
            "pyfuncitem.name.startswith('test') or call(pyfuncitem)"
        ),
        kinds=ALL,
    ),
    "a hook added to the list": Attack(
        at_import(
            "import pluggy\nHookImpl = getattr(pluggy, 'HookImpl', None) or pluggy._hooks.HookImpl\n"
            "options = dict.fromkeys(('hookwrapper', 'wrapper', 'optionalhook', 'trylast'), False)\n"
            "def run(pyfuncitem): return pyfuncitem.name.startswith('test') or None\n"
            f"{MANAGER}impl = HookImpl(None, 'x', run, {{**options, 'tryfirst': True, 'specname': None}})\n"
            "        one.hook.pytest_pyfunc_call._add_hookimpl(impl)"
        ),
        kinds=ALL,
    ),
    "hooks of a report that wrap it": Attack(
        at_import(
            "import pluggy\nHookImpl = getattr(pluggy, 'HookImpl', None) or pluggy._hooks.HookImpl\n"
            "def run(item, call):\n    outcome = yield\n"
            "    if item.name.startswith('test'): outcome.get_result().outcome = 'passed'\n"
            "options = dict.fromkeys(('wrapper', 'optionalhook', 'trylast'), False)\n"
            f"{MANAGER}impl = HookImpl(None, 'x', run, {{**options, 'hookwrapper': True, 'tryfirst': False, 'specname': None}})\n"
            "        one.hook.pytest_runtest_makereport._add_hookimpl(impl)"
        )
    ),
    "an expected failure added to the test": Attack(
        at_call(f"{ITEM}import pytest\nitem.add_marker(getattr(pytest.mark, 'xf' + 'ail'))"),
        kinds=("r2e_expected", "tests_json"),
    ),
    "errors that pluggy cannot see": Attack(
        at_import(
            "import sys, pluggy._callers\n"
            "def caught():\n    error = sys.exc_info()\n    return None if error[0] is AssertionError else error\n"
            f"pluggy._callers.sys = {ERRORS}"
        )
    ),
    "a call's error taken away by a profiler": Attack(
        at_import(
            "import sys\ndef seen(frame, event, argument):\n"
            "    if event == 'call' and frame.f_code.co_name == 'from_item_and_call':\n"
            "        if frame.f_locals['item'].name.startswith('test'): frame.f_locals['call'].excinfo = None\n"
            "sys.setprofile(seen)"
        ),
        kinds=ALL,
    ),
    "an expected exception that is any": Attack(
        at_import_and_call(
            "import pytest\nget = object.__getattribute__\n"
            "type(pytest.raises(ValueError)).__getattribute__ = lambda self, name: (\n"
            "    Exception if name == 'expected_exception' else get(self, name))",
            "raise KeyError",
        ),
        "raises",
    ),
    "a failure that only ends the case": Attack(
        at_call(f"{CASE}case.failureException = unittest.case._ShouldStop"), "unittest"
    ),
    "assertions that a case does not find": Attack(
        at_import(
            "import unittest\nget = object.__getattribute__\n"
            "unittest.TestCase.__getattribute__ = lambda self, name: (\n"
            "    print if name.startswith('assert') and 'test_' in type(self).__module__ else get(self, name))"
        ),
        "unittest",
    ),
    "a result that keeps no failure": Attack(
        at_call(
            "import gc, unittest\nclass Nothing(list):\n    def append(self, one): pass\n"
            "for one in gc.get_objects():\n    if isinstance(one, unittest.TestResult):\n"
            "        one.failures, one.errors = Nothing(), Nothing()"
        ),
        "unittest",
    ),
    "a result that notes each failure as a success": Attack(
        at_call(
            "import gc, unittest\nfor one in gc.get_objects():\n    if isinstance(one, unittest.TestResult):\n"
            "        one.addFailure = one.addError = lambda test, error, one=one: one.addSuccess(test)"
        ),
        "unittest",
    ),
    "errors that unittest cannot see": Attack(
        at_import(
            "import sys, unittest.case\n"
            "def caught():\n    error, frames = sys.exc_info(), []\n    last = error[2]\n"
            "    while last: frames.append(last.tb_frame.f_code.co_filename); last = last.tb_next\n"
            "    return None if any('test_' in path for path in frames) else error\n"
            f"unittest.case.sys = {ERRORS}"
        ),
        "unittest",
    ),
    "a method that the case looks up": Attack(
        at_import(
            "import unittest\nget = object.__getattribute__\n"
            "unittest.TestCase.__getattribute__ = lambda self, name: (\n"
            "    (lambda: None) if name.startswith('test_') else get(self, name))"
        ),
        "unittest",
    ),
}
