"""Takes replies apart, in the form in which each family of models writes thoughts and tool calls (`pipeline/reply_format.py`).

`replies.read_reply` is the one entry. A parser of tool calls is a function from text to the text without its calls, and these. All of them
read what a policy wrote, so they run in a process with limits.
"""
