"""Tables for the screen."""
