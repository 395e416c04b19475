"""The parent process of a run: prompts become rollouts, rollouts become adapters. It loads no model."""
