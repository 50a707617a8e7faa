"""The agent: prompts, the one-command-a-turn protocol, and the loop that plays an episode."""
