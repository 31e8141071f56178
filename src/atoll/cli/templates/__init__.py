"""The templates of `atoll new`: a small method that works, and its test."""
