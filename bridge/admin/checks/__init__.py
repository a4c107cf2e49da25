"""The checks that `doctor` lists, a module for each subject."""
