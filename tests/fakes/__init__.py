"""Stand-ins that are real processes."""
