"""Alerts and their life: opened, changed, stale, closed, and how they are recorded.

Here: the alert book, its history, and the severity of alerts and ranks. Not here: the rules that find something
(`detectors`) and how an alert is drawn (`view.alerts`). Begin with `model`.
"""
