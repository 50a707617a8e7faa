"""The trainer's requests and their results: dispatch, intake, groups, and the ledger of all of them."""
