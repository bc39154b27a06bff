"""The APIs: one module each with its bodies, its answers and the events of its streams."""
