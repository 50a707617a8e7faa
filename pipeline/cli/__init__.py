"""The queue's command line: what it finds (`finding`), how that reads (`text`), what its verbs do (`verbs`)."""
