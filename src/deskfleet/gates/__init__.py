"""What must be true of a server: launch gates before traffic (seconds), acceptance gates before trust (hours).

`registry` lists the gates, `run` asks them of a server, `report` says what came of it. Any OpenAI-compatible server
will do, from any machine. Knows no engine, no torch and no terminal.
"""
