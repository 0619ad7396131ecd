"""The trainable V4.1 model: the engine's function on packed rows, in plain torch with gradients.

Shape letters are the engine's (`deskfleet.engine`): T tokens, H heads, D head size, E experts, K chosen experts,
V vocabulary, C residual copies, M model width, N compressed entries; and here B rows of L tokens each.
"""
