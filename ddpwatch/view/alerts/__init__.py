"""Alerts as text: the panel of the overview and the page with evidence and advice.

Here: how an alert is shown. Not here: what it says, which is written beside its rule (`core.detectors`). Begin with
`format`.
"""
