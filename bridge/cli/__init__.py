"""The commands, a group in each module; each imports its modules when it runs."""
