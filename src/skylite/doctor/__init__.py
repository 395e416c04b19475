"""Checks of this machine, one small function each."""
