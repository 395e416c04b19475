"""Episodes of many turns: an OpenAI-compatible recorder, and processes that run the user's program."""
