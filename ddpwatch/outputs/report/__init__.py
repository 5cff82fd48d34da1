"""`ddpwatch report`: a recorded run as one page that can be sent to somebody."""
