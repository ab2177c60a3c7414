"""Pictures of runs and comparisons: one module for each kind, from what ``material`` holds."""
