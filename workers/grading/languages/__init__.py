"""What verdicts and controls know of other languages than Python: a module for each, and more of its name that it alone uses."""
