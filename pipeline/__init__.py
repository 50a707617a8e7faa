"""The contract: what travels between trainer and workers, and how.

Imports nothing of ours and nothing heavy.
"""

from pipeline.dependencies import name_missing_packages

name_missing_packages()
