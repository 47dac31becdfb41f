"""Reports of simulations and plans: one HTML file, or one PNG with its main pictures."""
