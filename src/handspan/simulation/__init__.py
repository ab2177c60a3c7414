"""Running many clients on one machine: the same numbers on every engine."""
