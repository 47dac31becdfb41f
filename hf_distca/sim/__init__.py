"""What a training step takes on machines that nobody has at hand: measured costs, and the schedule walked with them."""
