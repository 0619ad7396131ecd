"""The V4.1 forward pass as code that reads like its specification; every sum and rounding lives in `ops`."""
