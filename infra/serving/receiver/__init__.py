"""The receiver: a server on an engine's host that keeps weight versions on local disk and makes each from an earlier one by a patch."""
