"""Damaged files for every reader: `make fuzz`, and a few of them in the unit tests."""
