"""The command line: one file a sub-command, each importing its front end only when it runs."""
