"""What people do from the command line beside running the bridge."""
