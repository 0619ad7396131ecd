"""What Pocket is trained on: one module for each task, rendered and packed into rows.

`stream` makes rows, `evaluate` makes evaluation sets and judges answers, `render` spells conversations as the
codec does, `example` says what a task produces. `python -m pocket.data` shows examples.
"""
