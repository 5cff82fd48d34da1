"""The dashboard: thin widgets around the drawings of `view`. Measures nothing and judges nothing."""
