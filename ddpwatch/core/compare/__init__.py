"""Whether two runs differ in speed: bootstrap confidence intervals, widened by each run's own drift.

Here: the statistics. Not here: reading the recordings (`outputs.compare`) and the text (`view.comparison`).
"""
