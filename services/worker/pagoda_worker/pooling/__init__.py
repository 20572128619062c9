"""What is made of hidden states instead of tokens: vectors, labels, scores."""
