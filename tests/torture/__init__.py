"""Runs that are killed, stopped and resumed, as real processes: `make torture`, and a few of them in `make
test`."""
