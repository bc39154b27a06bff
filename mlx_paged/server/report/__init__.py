"""What a server says of itself: figures, blocks, metrics and the cache page."""
