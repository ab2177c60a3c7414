"""Models: tasks from any torch module, the papers' networks, side information."""
