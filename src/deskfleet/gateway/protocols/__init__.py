"""The protocols that clients speak, one module each, and what they share.

Every protocol is a `protocol.Protocol`: a body becomes tokens for an engine, an engine's tokens become events or one
object. `conversation.py` and `answer.py` hold what protocols with a conversation share, `markup.py` and `calls.py` how
calls are found in what a model writes.
"""
