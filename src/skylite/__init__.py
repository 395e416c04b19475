"""skylite: reinforcement learning of a LoRA adapter on one machine, with verification that the engine samples it."""

__version__ = "0.2.0"
