"""What happens to a message on its way: clipped, compressed, noised, masked, counted and judged."""
