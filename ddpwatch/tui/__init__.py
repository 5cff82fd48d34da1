"""The dashboard: a Textual application over the lines that `view` makes.

Here: widgets, keys, themes and the thread that follows the run. Not here: what is drawn (`view`). Read `app`,
`screens`, `feed` and `feed_thread`.
"""
