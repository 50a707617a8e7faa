"""Control runs: the hidden tests with contradicted expectations, under which they must fail."""
