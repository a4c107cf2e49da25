"""The commands, their options and their output; `bridge.admin` does the operators' tasks.

The commands of a module import what they need when they run, so that --help is quick.
"""
