"""Charts in terminal cells: lines over time, sparklines, the heat map and phase bars.

Here: drawing values. Not here: which values (`core.metrics`). Begin with `chart` and `axis`.
"""
