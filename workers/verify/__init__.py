"""Verification: what the production grader says of tasks whose answers are known, before anything is trained on them."""
