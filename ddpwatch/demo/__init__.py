"""A training job to watch, for people who have none at hand. Needs torch; nothing of the viewer imports it."""
