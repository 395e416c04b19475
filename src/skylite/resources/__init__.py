"""Which GPUs a run uses, and how much memory its parts need, predicted from files before anything starts."""
