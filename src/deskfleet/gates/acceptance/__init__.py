"""Acceptance gates: minutes to hours, before trust. One module for each gate or small family."""
