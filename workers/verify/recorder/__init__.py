"""The part of an observed run that is inside the process of the tests: plain Python 3.6, joined into one file by observing.py."""
