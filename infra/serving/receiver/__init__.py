"""The receiver: a small server on an engine's host that keeps weight versions on local disk, each made from the one before by a patch."""
