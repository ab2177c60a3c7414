"""What the matrix factorisations share: the objective, its steps, sets, the start, the penalty."""
