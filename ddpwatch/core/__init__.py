"""What the records mean: state and accounting. No I/O, no threads, no clock."""
