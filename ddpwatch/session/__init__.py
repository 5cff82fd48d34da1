"""A run being followed: source, monitor and recorder driven together, live or from a recording.

Here: the loops that headless commands and the dashboard share. Not here: drawing. Read `run_follower` (live),
`playback` (a recording with seeks), `replay_backfill` (older steps filled in after a seek).
"""
