"""The web pages that show runs, and the JSON that they are drawn from. The pages are read-only unless actions are allowed."""
