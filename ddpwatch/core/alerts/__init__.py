"""Alerts and their life: opened, changed, stale, closed, and how they are recorded.

Here: the alert book and its history. Not here: the rules that find something (`detectors`) and how an alert is drawn
(`view.alerts`). Begin with `model`.
"""
