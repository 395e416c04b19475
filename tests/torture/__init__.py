"""Real runs that are killed, stopped and resumed: `make torture`, and a few of them in `make test-all`."""
