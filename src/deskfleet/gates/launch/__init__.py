"""Launch gates: seconds, before traffic. One module for each gate or small family."""
