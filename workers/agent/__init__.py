"""The agent: prompts, the protocol of one command per turn, and the loop that plays an episode."""
