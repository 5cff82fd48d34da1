"""Outputs other than screens: alert sinks, Prometheus, reports, exports, comparisons, the relay.

Here: one module or package for each output. Not here: the figures in them (`core`), reading recordings (`recording`),
their wording (`view`). Begin with `headless` (follows a live run) or `export.step_range` (reads a recording).
"""
