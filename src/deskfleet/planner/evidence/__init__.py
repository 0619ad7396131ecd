"""The planner against published figures. Owns what was published and how far ours may be off; computes nothing itself.

`rows()` are figures that the planner's functions give too, `facts()` those that nothing can be computed of,
`contradictions()` what sources disagree on. `page` writes them down.
"""
