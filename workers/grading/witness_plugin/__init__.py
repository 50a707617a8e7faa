"""What the witness does inside the process that runs the tests. witness.py copies it there, under a random name.

As a plugin of pytest, or called at the start of a Python that will run unittest, it reports that a run starts before any
code under test is imported, and how it ended. Both reports go to the container's side channel, where nothing can be taken
back. The end carries the secret of the start, which nobody else was told.

The modules of this package are joined, in the order of witness.MODULES, into one file that needs nothing but Python's
standard library; lines that import one module from another are left out. All of it must run under any Python since 3.5 and
any pytest, so there are no annotations and no f-strings. It must never be in the way of the tests: what it cannot do it
leaves undone.
"""
