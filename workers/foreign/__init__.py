"""Agent programs of others: the policy replies to their model requests, and the replies are recorded as turns."""
