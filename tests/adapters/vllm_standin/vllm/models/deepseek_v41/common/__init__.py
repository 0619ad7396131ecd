"""What the package of the model has in common."""
