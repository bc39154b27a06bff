"""What a request says its answer has to be, from the parameters of its body."""
