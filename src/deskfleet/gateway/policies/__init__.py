"""What an operator lets clients do: one module per policy, the same on every engine and in every protocol.

A policy knows token ids and plain numbers. It knows nothing of protocols, of JSON or of how an engine works.
"""
