"""Stop strings: where an answer's text ends."""
