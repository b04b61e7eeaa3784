"""Hostile input for everything that mergefs parses; see `tools.fuzz.__main__`."""
