"""Recordings: one SQLite file with every frame of a run, checkpoints to seek by, and its alerts.

Here: format, writing, one reader with three uses (`replay`, a source of frames; `steps`, windows of aligned steps;
`alerts`, a scan), and recovery of damaged files. Not here: seeking on screen (`session.playback`). Read `schema`,
`writer`, `reader`, then the uses.
"""
