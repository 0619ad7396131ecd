"""Where the time of a step goes: traces of torch's profiler, of one rank or several."""
