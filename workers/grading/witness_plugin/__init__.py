"""What the witness does inside the process that runs the tests; witness.py puts it there, under a random name.

As a plugin of pytest, or called at the start of a Python that will run unittest, it reports that a run starts before any
code under test is imported, and how it ended once all is over. Both go to the side channel of the container, where nothing
can be taken back. The end carries the secret of the start, which nobody else was told.

The modules of this package are joined, in the order of witness.MODULES, into one file that needs nothing but Python's own
library; lines that import one from another are left out. All of it must run under any Python since 3.5 and any pytest, so
nothing is annotated and no string is formatted in place. And it must never be in the way: what it cannot do it leaves.
"""
