"""Pocket: the small trained checkpoint. Data, model, training and evaluation, run from the repository root.

`pocket.batch` is the seam between data and model; `pocket.data` generates, `pocket.tokenizer` spells.
"""
