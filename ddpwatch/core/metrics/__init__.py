"""Figures over steps that all ranks have finished: medians, wire and wait, straggler cost, histograms, utilization.

Here: arithmetic on aligned steps. Not here: deciding whether a figure is bad (`detectors`). Read `window` (aligned
steps and the split into wire and wait), `live_metrics` (the latest steps), `aggregate` (a whole run), `hung_steps`.
"""
