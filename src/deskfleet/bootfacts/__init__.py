"""What an engine was asked for and what it granted, rank by rank, as its boot logs tell."""
