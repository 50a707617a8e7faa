"""What verdicts and controls know of each programming language: one module for each, with others of its name
that it alone uses."""
