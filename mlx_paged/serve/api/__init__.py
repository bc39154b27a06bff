"""What clients may say and what they are told: parameters, endpoints, and the forms of answers."""
