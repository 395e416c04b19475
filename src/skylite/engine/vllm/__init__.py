"""All that names vLLM: its command, its requests and replies, its messages, its models."""
