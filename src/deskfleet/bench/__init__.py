"""Numbers with their provenance: what was measured, how, on what, and every raw sample."""
