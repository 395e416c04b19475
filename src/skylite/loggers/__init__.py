"""Experiment loggers, fed by metrics.jsonl. Each runs in a process of its own."""
