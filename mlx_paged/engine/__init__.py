"""The engine: scheduler, prefill, decode batch, prefix sharing and compiled steps."""
