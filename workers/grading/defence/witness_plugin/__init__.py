"""The witness's code in the process that runs the tests. witness.py copies it there, under a random name.

As a plugin of pytest, or called at the start of a Python that will run unittest, it reports the start of a run before any code under test
is imported, and the end of the run. Both reports go to the container's side channel, where nothing can be changed afterwards. The report of
the end contains the secret of the start, which no other code knows.

The modules of this package are joined, in the order of witness.MODULES, into one file that needs only Python's standard library; lines that
import one module from another are left out. All of it must run under any Python since 3.5 and any pytest, so there are no annotations and
no f-strings. It must never disturb the tests: it skips what it cannot do.
"""
