"""What a package outside coterie brings along: an algorithm, a model, a data set and a federation."""
