"""Starting runs: local processes and Slurm jobs."""
