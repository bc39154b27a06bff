"""What requests take from prefixes that are computed already, and what they leave."""
