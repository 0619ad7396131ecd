"""The native engine: the only package that imports torch.

Shape letters used in trailing comments everywhere below: T tokens (rows of one step), B requests,
H heads, D head size, E experts, K chosen experts, V vocabulary, R rows, C residual copies, M model width,
L length of an index list, N compressed entries.
"""
