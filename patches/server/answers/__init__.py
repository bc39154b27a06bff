"""From a checked request to its answers: arguments, several choices at a time, log-probabilities of prompts."""
