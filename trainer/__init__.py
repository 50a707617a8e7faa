"""One run: decides which rollouts are requested, and learns from the results.

Imports `pipeline` only; only `learner/`, `feed.py` and `warmstart/` use torch.
"""

from pipeline.commandline import name_missing_packages

name_missing_packages()
