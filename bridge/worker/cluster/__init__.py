"""What the workers of one queue tell each other, so that several behave like one."""
