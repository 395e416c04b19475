"""The parent's side of a run: prompts to rollouts to adapters. Holds no model."""
