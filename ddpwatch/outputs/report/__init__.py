"""`ddpwatch report`: one HTML page about a recording.

Read `data` (one pass over the recording), `sections` (text and tables), `charts`, `html_elements` (escaping), `page`.
"""
