"""The fleet: from a list of machines in fleet.toml to one verified endpoint, and back.

What is wished is `spec`, where each value of it comes from `effective`, a first file `initial`, what the planner says
of it `planning`, and the same launch for other launchers `export`. Nothing here talks to a terminal.
"""
