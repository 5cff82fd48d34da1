"""State, metrics and diagnosis of a run: a pure function of the frames and ticks that came in.

Here: no sockets, files, threads or clocks; time arrives with messages. Not here: text layout (`view`) and reading or
writing anything (`sources`, `recording`, `outputs`).

Read `monitor` (one run from frame to alert), `state` (what is known of each rank), `metrics` (figures over aligned
steps), `detectors` (one file a rule), `alerts` (opening, closing, history), `diagnosis` (why, and how a run ended).
`limits` has every threshold, `rule_names` every rule's name, `units` formats numbers.
"""
