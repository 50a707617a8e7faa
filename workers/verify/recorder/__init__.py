"""Code inside the processes of the tests: reads.py, which fixed.py installs; and plain Python 3.6, joined into one file by observing.py."""
