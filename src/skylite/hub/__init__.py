"""Resolve model names to checked local folders."""
