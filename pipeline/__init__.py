"""The contract between trainer and workers: the messages that travel, and how they travel.
Imports no other package of ours and nothing heavy.
"""

from pipeline.commandline import name_missing_packages
from pipeline.screen import guard_screens

name_missing_packages()
guard_screens()
guard_screens()
