"""What a server needs besides HTTP: request bodies, stop strings, keys, statistics, the cache page."""
