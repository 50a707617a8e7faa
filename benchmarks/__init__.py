"""How fast, as ratios to named rivals and floors measured in the same run. Nothing imports this."""
