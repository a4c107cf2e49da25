"""Keep the order of each key across workers: one worker at a time takes from a lane."""
