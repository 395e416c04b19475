"""skylite: reinforcement learning of a LoRA adapter on one machine."""

__version__ = "0.2.0"
