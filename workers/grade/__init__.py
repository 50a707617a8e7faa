"""Grading of patches that were made elsewhere, with the production grader, without a queue."""
