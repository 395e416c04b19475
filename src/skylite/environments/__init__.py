"""Episodes of many turns: an OpenAI-compatible server, and processes that run the user's program."""
