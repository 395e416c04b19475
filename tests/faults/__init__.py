"""A file system that fails on purpose: a preload library, and processes that run skylite's writers."""
