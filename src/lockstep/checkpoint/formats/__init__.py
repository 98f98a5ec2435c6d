"""What is read and written: one file a format."""
