"""What the gateway adds: the same answers with and without it, and through another gateway, side by side in one run."""
