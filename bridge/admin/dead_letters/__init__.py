"""What operators do with dead letters: look at them, send them again, take them away."""
