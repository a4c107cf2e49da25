"""The commands, a group in each module; each imports what it needs when it runs."""
