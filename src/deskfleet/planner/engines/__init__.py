"""What each engine does with memory: one file for each, all behind `EngineRules`."""
