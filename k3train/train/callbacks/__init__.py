"""Features of a run, one a file. The order in `k3train.train.run` is the order in which they act."""
