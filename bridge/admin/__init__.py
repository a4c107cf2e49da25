"""The operators' tasks, one module for each; `bridge.cli` has their options and their output."""
