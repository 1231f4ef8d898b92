"""Where rollouts come from: the student's own sampling, or a file of earlier ones."""
