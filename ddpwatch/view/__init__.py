"""What people read, as lines of cells: pure functions of a run view, with no terminal behind them.

Here: choosing, wording, aligning and coloring. Not here: working figures out (`core`) and widgets (`tui`). Read `cells`
(a line of text with levels), `run_view` (the snapshot that everything is drawn from), `overview`, then the packages
`ranks`, `gpus`, `alerts` and `charts`.
"""
