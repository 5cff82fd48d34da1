"""`ddpwatch report`: one HTML page about a recording.

Read `data` (what is read of the recording), `sections` (what is said), `charts`, `html` (escaping), `page`.
"""
