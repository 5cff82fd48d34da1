"""Recordings: one SQLite file with every frame of a run, checkpoints to seek by, and the alerts that were open.

Here: format, writing, reading, recovery of damaged files, and replay, which is a source of frames. Not here: stepping
through a recording on screen (`session.playback`). Read `schema`, `writer`, `reader`, then `replay` and `steps`.
"""
