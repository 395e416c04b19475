"""Model names to checked local folders."""
