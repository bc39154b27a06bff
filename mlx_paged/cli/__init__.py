"""The commands: generate, server, launch and doctor."""
