"""Verification: runs the production grader on tasks whose answers are known, before anything is trained on them."""
