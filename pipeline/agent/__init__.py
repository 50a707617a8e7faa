"""Agent files: how mini-swe-agent's YAML is read and merged, what each of its keys means here, and the prompts that it renders."""
