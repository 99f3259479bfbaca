"""A mixture whose experts are spread over ranks, computed where the tokens are: weights travel, tokens do not."""
