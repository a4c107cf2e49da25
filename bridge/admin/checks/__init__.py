"""The checks that `bridge.admin.doctor` runs, a module for each subject."""
