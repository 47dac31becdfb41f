"""Reports of simulations and plans, one HTML file each."""
