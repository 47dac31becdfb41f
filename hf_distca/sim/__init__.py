"""What a training step takes on machines that are not at hand: measured costs, and the schedule walked with them."""
