"""One run: decides what is asked, learns from what came back. Imports `pipeline` only; torch lives in
`learner/` and `feed.py`.
"""

from pipeline.dependencies import name_missing_packages

name_missing_packages()
