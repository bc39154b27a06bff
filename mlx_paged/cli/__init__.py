"""The commands: generate, server, prompts files."""
