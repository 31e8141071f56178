"""What `atoll new` starts from: a small method that works, and its test."""
