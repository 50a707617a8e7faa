"""What commands have in common that grade tasks, or look at them, without a queue: workers.verify, workers.grade, workers.leaks."""
