"""Simulation of training steps on other machines: schedules walked with measured costs."""
