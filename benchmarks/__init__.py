"""What ddpwatch costs, measured on the machine at hand and printed with the noise that was there. `make bench`."""
