"""Alerts as text: the panel of the overview and the page with evidence and advice.

Here: how an alert is shown. Not here: its message, which is written beside its rule (`core.detectors`), and its
severity (`core.alerts.severity`). Begin with `format`.
"""
