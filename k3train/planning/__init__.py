"""Closed forms: parameters, FLOPs, memory and time of a configuration, and the layout they suggest."""
