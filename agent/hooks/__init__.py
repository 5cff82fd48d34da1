"""Where ddpwatch listens to torch. Each file attaches to one thing, and says what it takes away again."""
