"""Comparisons: arms (configurations that differ in one thing) trained over seeds, and the tables made of them."""
