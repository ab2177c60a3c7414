"""Vocabulary and law: records, keys, tasks, algorithms and the only training loop."""
