"""What verdicts and controls know of each programming language: one module for each."""
