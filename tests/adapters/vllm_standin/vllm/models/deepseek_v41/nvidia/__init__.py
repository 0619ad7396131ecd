"""What only CUDA has."""
