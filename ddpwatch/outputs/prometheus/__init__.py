"""`ddpwatch watch --prometheus`: metrics of a run and the HTTP server that Prometheus scrapes.

Read `metrics` (names and values), `exporter` (which run), `server` (limits on size, time and connections).
"""
