"""How each engine is launched over nodes: one module per engine behind `contract.EngineLauncher`."""
