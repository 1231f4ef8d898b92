"""What lets a run end well and go on later: the directory's lock, signals, and ranks that notice when another dies."""
