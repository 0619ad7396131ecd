"""Helpers for tests and demonstrations, for users too: tiny checkpoints, stand-ins, a scripted engine."""
