"""The checks that `run` runs, a module for each subject."""
