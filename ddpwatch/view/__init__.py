"""State as text, for every front end."""
