"""How often a server answers rightly: questions with known answers, asked over HTTP. Knows no engine and no torch."""
