"""`python -m ddpwatch`."""

from ddpwatch.cli.main import main

main()
