"""Text that users read, as lines of cells: pure functions of a run view that need no terminal.

Here: choosing, wording, aligning and coloring. Not here: computing figures (`core`) and widgets (`tui`). Read `cells`
(a line of text with levels), `run_view` (the snapshot that everything is drawn from), `overview`, then the packages
`ranks`, `gpus`, `alerts` and `charts`.
"""
