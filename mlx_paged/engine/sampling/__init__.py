"""How the next token of each row of a batch is chosen, for all rows in one set of operations, on the device."""
