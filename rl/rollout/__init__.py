"""Generation for training and evaluation: requests in, sampled tokens with their log-probabilities out."""
